"""``rollout: {sync: adapter}`` with a real `grpo-lab serve --max-lora-rank`: the adapter alone, proven at every step,
and sent again to the server that comes after a killed one.

One server for the file; the last test kills it, and starts the second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from peft import LoraConfig
from transformers import TrainerCallback

from distributed.launch import run_worker
from grpo_lab import LabTrainer
from grpo_lab.engines.vllm.talk import wait_until_ready
from grpo_lab.engines.vllm.token import of_trainer
from grpo_lab.engines.weights.sync import WeightSyncError
from rollouts.served import Again, Served, served_from
from rollouts.server_runs import build, kill_during, logged

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TALK = {"retries": 1, "backoff": 0.1, "request_timeout": 600}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_from(tmp_path_factory.mktemp("served"), "--max-lora-rank", "8") as running:
        yield running


def training(folder: Path, served: Served, rank: int = 4, rollout: Any = None, **changes: Any) -> LabTrainer:
    lora = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    rollout = {"sync": "adapter", "verify_every": 1, "server": TALK, **(rollout or {})}
    return build(folder, served.model, served.url, peft_config=lora, rollout=rollout, **changes)


def test_eight_steps_with_the_adapter_alone(served: Served, tmp_path: Path) -> None:
    trainer = training(tmp_path, served, max_steps=8)
    trainer.train()
    history, files = trainer.state.log_history, trainer.vllm_generation.adapters
    gaps = logged(history, "rollout/sync_gap")
    assert len(gaps) == 8
    assert max(gaps) < 1e-4
    assert max(logged(history, "sampling/sampling_logp_difference/mean")) < 1e-4
    trained = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert logged(history, "rollout/sync_bytes") == [4.0 * sum(p.numel() for p in trained)] * 8
    known = [one["id"] for one in served.ask("GET", "/v1/models").json()["data"]]
    assert known == [served.model, f"{files.name}-v7", f"{files.name}-v8"]
    assert sorted(path.name for path in files.folder.iterdir()) == ["v7", "v8"]


def test_a_version_that_was_not_loaded_is_caught(served: Served, tmp_path: Path) -> None:
    """Written, and the server goes on with the first."""
    trainer = training(tmp_path, served, learning_rate=5e-2)
    client = trainer.vllm_generation.vllm_client
    load, loaded = client.load_adapter, []

    def first_alone(version: Any) -> None:
        if not loaded:
            load(version)
        loaded.append(version)

    client.load_adapter = first_alone
    with pytest.raises(WeightSyncError, match=r"does not sample from the trainer's policy: gap"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert len(loaded) == 2


def test_an_adapter_of_too_high_a_rank_is_refused_before_the_first_step(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes adapters of a rank of at most 8.*--max-lora-rank 16"):
        training(tmp_path, served, rank=9)


@pytest.mark.parametrize(
    "body",
    [
        {"lora_name": "grpo-lab-" + "0" * 32 + "-v1", "lora_path": "/etc"},
        {"lora_name": "grpo-lab-" + "0" * 32 + "-v1", "lora_path": "/dev/shm/grpo-lab-weights-x/../../etc"},
        {"lora_name": "mine", "lora_path": "/dev/shm/grpo-lab-weights-x/v1"},
        {
            "lora_name": "grpo-lab-" + "0" * 32 + "-v1",
            "lora_path": "/dev/shm/grpo-lab-weights-x/v1",
            "load_inplace": True,
        },
    ],
)
def test_only_a_trainers_adapters_are_loaded_and_never_in_place(served: Served, body: dict[str, Any]) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert served.ask("POST", path, json=body).status_code == 403, path
    assert served.ask("POST", "/v1/load_lora_adapter", data=json.dumps(body)).status_code == 415


@pytest.mark.thorough(but="fsdp2-FSDPPeftModel")
@pytest.mark.parametrize(("kind", "wrapped"), [("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPPeftModel")])
def test_two_ranks_send_one_adapter(kind: str, wrapped: str, served: Served, tmp_path: Path) -> None:
    """Under FSDP2 each holds a half of every tensor of it."""
    script = str(Path(__file__).with_name("adapter_ranks"))
    run_worker(script, kind, 2, served.model, served.url, tmp_path)
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["wrapped"] for report in reports] == [wrapped, wrapped]
    history = reports[0]["history"]
    assert max(logged(history, "rollout/sync_gap")) < 1e-4
    assert len(logged(history, "rollout/sync_gap")) == 3
    assert logged(history, "rollout/sync_bytes") == logged(reports[1]["history"], "rollout/sync_bytes") == [18432] * 3


class StartedAgain(TrainerCallback):
    """Behind the same address, between two steps."""

    def __init__(self, after: int, again: Callable[[], None], url: str) -> None:
        self.after, self.again, self.url = after, again, url

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            self.again()
            wait_until_ready(self.url, 600, token=lambda: of_trainer(self.url, None))


def test_a_server_that_comes_after_a_killed_one_gets_the_adapter(served: Served, tmp_path: Path, request: Any) -> None:
    """Last of the file. Killed in the third of five generations, and once more between the fourth and the fifth: the
    adapter is sent again and proven, before anything of the new server is trained on."""
    talk = {**TALK, "return_timeout": 600}
    trainer = training(tmp_path, served, rollout={"verify_every": 0, "server": talk}, max_completion_length=100)
    second = Again(served, tmp_path)
    request.addfinalizer(second.stop)
    times = kill_during(trainer.vllm_generation.vllm_client, 3, second.start)

    def third_start() -> None:
        assert second.process is not None
        third = Again(dataclasses.replace(served, process=second.process), tmp_path / "third")
        request.addfinalizer(third.stop)
        third.start()
        second.process = None

    trainer.add_callback(StartedAgain(4, third_start, served.url))
    trainer.train()
    assert times["failed"] > times["killed"]
    history, files = trainer.state.log_history, trainer.vllm_generation.adapters
    assert trainer.state.global_step == 5
    assert logged(history, "rollout/server_returns") == [0, 0, 1, 0, 1]
    gaps = logged(history, "rollout/sync_gap")
    assert [gap is not None for gap in gaps] == [False, False, True, False, True]
    assert max(gaps[2], gaps[4]) < 1e-4
    assert max(logged(history, "sampling/sampling_logp_difference/mean")) < 1e-4
    assert files.number == 7  # a sync a step, and two more
    assert trainer.vllm_generation.vllm_client.adapters == [f"{files.name}-v7"]
