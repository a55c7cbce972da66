"""What a run is told before it starts on the wrong server, and what ends it in time: one real server for the module."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from datasets import Dataset
from tokenizers import Tokenizer
from transformers import TrainerCallback

from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.server import Server, ServerOptions
from grpo_lab.engines.vllm.talk import ServerGone, post_json
from grpo_lab.engines.vllm.worker import WeightCourier, worker_reports
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.prompt_fit import PromptTooLong
from grpo_lab.trainer.generation.server_client import LabVLLMClient
from ports import free_port
from rollouts.checkpoints import servable
from rollouts.server_runs import build, kill_during
from rollouts.test_server import session

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def saved(folder: Path, **changes: Any) -> str:
    return servable(folder, tie_embeddings=True, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("guard") / "model")


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ServerOptions(model, free_port(), EngineOptions(kv_cache_gib=0.125, max_model_len=512))
    log = tmp_path_factory.mktemp("guard_server") / "log"
    with Server(options, log=log, start_timeout=300):
        yield options.base_url


def other_ends(model: str, folder: Path) -> str:
    """The same model, whose generation config ends completions elsewhere."""
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9]}))
    return str(folder)


def other_words(model: str, folder: Path) -> str:
    """The same model, whose tokenizer has two tokens change places."""
    shutil.copytree(model, folder)
    written = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[5:7]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(written))
    Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_ends, r"end-of-sequence ids are \[\d+\], the trainer's \[7, 9, \d+\]"),
        (other_words, "other tokens behind the same ids"),
        (lambda _, folder: saved(folder, intermediate_size=96), r"gate_proj\.weight: .*the trainer's \[96, 64\]"),
        (lambda _, folder: saved(folder, num_layers=3), r"layers\.2\..*not there, the trainer's"),
    ],
)
def test_a_server_of_another_model_is_refused_before_anything_is_loaded(
    change: Callable[[str, Path], str], told: str, server: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"serves another model than the trainer trains(.|\n)*{told}"):
        build(tmp_path, change(model, tmp_path / "changed"), server)


def test_a_server_without_our_worker_is_tried_out(
    server: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LabVLLMClient, "has_worker", property(lambda client: False))
    with caplog.at_level(logging.WARNING, logger="grpo_lab"):
        build(tmp_path, model, server)
    assert "shapes of its parameters were not compared" in caplog.text
    with pytest.raises(ValueError, match=r"do not end at the trainer's end-of-sequence ids \[7, 9\]"):
        build(tmp_path, other_ends(model, tmp_path / "ends"), server)
    with pytest.raises(ValueError, match="cuts the same text into other tokens"):
        build(tmp_path, other_words(model, tmp_path / "words"), server)


def test_another_chat_template_is_told_and_trains(
    server: str, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(model, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with caplog.at_level(logging.WARNING, logger="grpo_lab"):
        build(tmp_path, str(tmp_path / "chat"), server)
    assert "its chat template is not the trainer's" in caplog.text


def completion(url: str, model: str) -> Any:
    body = {"model": model, "prompt": [[5, 6, 7]], "max_tokens": 8, "temperature": 0, "logprobs": 0}
    choice = session(url).post(f"{url}/v1/completions", json={**body, "return_token_ids": True}).json()
    return choice["choices"][0]["token_ids"], choice["choices"][0]["logprobs"]["token_logprobs"]


def test_after_a_failed_load_the_server_still_answers(server: str, model: str) -> None:
    """And holds nobody's version, so that no run takes anything from it before the next sync."""
    from transformers import AutoModelForCausalLM

    courier = WeightCourier(functools.partial(post_json, session(server), server))
    params = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(WeightSyncError, match=r"failed at grpo_lab_load_weights: .*down_proj"):
        courier.push({**params, name: torch.zeros(64, 8)}.items())
    with pytest.raises(WeightSyncError, match="not in the trainer's stream"):
        courier.push([(key, value * 2) for key, value in params.items() if key != name])
    assert len(completion(server, model)[0]) == 8
    assert not courier.is_current()


def test_a_prompt_beyond_the_context_is_found_in_the_data(
    server: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"Tom has {n} apples. How many?" for n in range(32)]
    rows[20] = "Tom has 3 apples and " * 160
    monkeypatch.setattr("rollouts.server_runs.Dataset", Rows(Dataset.from_dict({"prompt": rows})))
    with pytest.raises(
        ValueError, match=r"`train_dataset`: row 20 \(\d+ tokens\) leave no room for 16 .* context of 512"
    ):
        build(tmp_path, model, server)


class Rows:
    """In the place of `Dataset` where `build` makes its rows."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def from_dict(self, _: Any) -> Any:
        return self.rows


def test_a_prompt_beyond_the_context_in_the_middle_of_a_run_keeps_a_checkpoint(
    server: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with streamed data, which nobody reads beforehand."""
    rows = [f"Tom has {n} apples. How many?" for n in range(10)]
    rows[4] = "Ann has 3 apples and " * 160
    monkeypatch.setattr("rollouts.server_runs.Dataset", Rows(Dataset.from_dict({"prompt": rows})))
    monkeypatch.setattr("grpo_lab.trainer.step_components.check_training_prompts", lambda *_: None)
    trainer = build(tmp_path, model, server, shuffle_dataset=False)
    with pytest.raises(
        PromptTooLong, match=r"begins 'Ann has 3 apples(.|\n)*context of 512(.|\n)*checkpoint of step 2"
    ):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").is_file()


def test_a_server_that_was_started_again_as_another_is_noticed_at_the_sync(
    server: str, model: str, tmp_path: Path
) -> None:
    """Between two steps, where no request is lost; before, its completions ended elsewhere and were trained on."""
    trainer = build(tmp_path, model, server)
    post = functools.partial(post_json, session(server), server)

    class Again(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:  # weights from the disk have no version; and the two no longer agree
                worker_reports(post, "grpo_lab_note_version", version="", moved=False)
                trainer.model.generation_config.eos_token_id = [7, 9]

    trainer.add_callback(Again())
    with pytest.raises(
        ServerGone, match=r"started again since the last sync(.|\n)*end-of-sequence ids(.|\n)*checkpoint of step 2"
    ):
        trainer.train()


def sleeping_from(trainer: Any, generation: int, url: str, then: Callable[[], None] = lambda: None) -> None:
    """The server is put to sleep before the run's request number `generation`."""
    client, calls = trainer.vllm_generation.vllm_client, [0]
    generate = client.generate

    def sleeps(*args: Any, **arguments: Any) -> Any:
        calls[0] += arguments["n"] > 1  # the run's own, not a probe of the proof
        if calls[0] == generation:
            session(url).post(f"{url}/sleep?level=1").raise_for_status()
            then()
        return generate(*args, **arguments)

    client.generate = sleeps


def test_a_sleeping_server_ends_the_wait_with_a_checkpoint(server: str, model: str, tmp_path: Path) -> None:
    rollout = {"verify_every": 1, "server": {"silence_timeout": 8}}
    trainer = build(tmp_path, model, server, rollout=rollout)
    sleeping_from(trainer, 3, server)
    begin = time.monotonic()
    try:
        with pytest.raises(ServerGone) as caught:
            trainer.train()
    finally:
        session(server).post(f"{server}/wake_up")
    assert time.monotonic() - begin < 300
    for said in ("no sign of work for 8 s", "8 completions of 2 prompts", "put to sleep", "silence_timeout"):
        assert said in str(caught.value), str(caught.value)
    assert "checkpoint of step 2" in str(caught.value)
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").is_file()


def sleep_under_way(url: str) -> None:
    """Put the server to sleep as soon as it says that it works on a request."""
    known = session(url)
    give_up = time.monotonic() + 60
    while not re.search(r"^vllm:num_requests_running\{.*\} [1-9]", known.get(f"{url}/metrics").text, re.MULTILINE):
        assert time.monotonic() < give_up, "the server began no request"
    known.post(f"{url}/sleep?level=1").raise_for_status()


def test_completions_that_a_sleep_broke_off_are_not_trained_on(server: str, model: str, tmp_path: Path) -> None:
    """`/sleep` under a generation: vLLM answers 200 with what was there, `finish_reason: abort`. Before, it was trained
    on."""
    trainer = build(tmp_path, model, server, max_completion_length=480, rollout={"verify_every": 0})
    kill_during(trainer.vllm_generation.vllm_client, 3, lambda: sleep_under_way(server), after=0)
    try:
        with pytest.raises(
            ServerGone, match=r"completion \d was broken off after \d+ tokens(.|\n)*checkpoint of step 2"
        ):
            trainer.train()
    finally:
        session(server).post(f"{server}/wake_up")


def test_ctrl_c_while_waiting_for_the_server_keeps_a_checkpoint(server: str, model: str, tmp_path: Path) -> None:
    trainer = build(tmp_path, model, server, save_strategy="steps", save_steps=500)
    sleeping_from(trainer, 3, server, lambda: threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start())
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(
            KeyboardInterrupt, match=r"interrupted after step 2; a checkpoint was written to .*checkpoint-2"
        ):
            trainer.train()
    finally:
        session(server).post(f"{server}/wake_up")
    assert signal.getsignal(signal.SIGINT) is handler
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").is_file()
