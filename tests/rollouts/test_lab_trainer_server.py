"""``LabTrainer`` with ``vllm_mode: server``: a real vLLM in a second process, weights through shared memory, planted
faults.

One server serves most of the module: another run's weights replace the last run's at its first sync.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from safetensors.torch import load_file

from distributed.launch import run_worker
from grpo_lab import LabConfig
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm import worker
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.server import Server, ServerOptions
from grpo_lab.engines.vllm.talk import ServerGone, check_answer
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation import server_client
from grpo_lab.trainer.step.bad_step import read_bad_step
from ports import free_port
from rollouts.checkpoints import servable
from rollouts.served import Served, served_from
from rollouts.server_runs import Moves, assert_proven, build, kill_during, logged, poison

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
LONG = {"max_completion_length": 100}  # a generation takes long enough to be killed under way


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return servable(tmp_path_factory.mktemp("model"), tie_embeddings=True)


def start(model: str, folder: Path) -> Server:
    engine = EngineOptions(kv_cache_gib=0.125, max_model_len=256)
    return Server(ServerOptions(model, free_port(), engine), log=folder / "server.log", start_timeout=300).start()


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(model, tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def new_server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In the place of the one that was killed."""
    running = start(model, tmp_path_factory.mktemp("new_server"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run that loses its server."""
    return tmp_path_factory.mktemp("crashed")


@pytest.fixture
def weight_folders(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the names of this process's folders begin with; another's training may be on this machine."""
    monkeypatch.setattr(worker, "FOLDER_PREFIX", f"{worker.FOLDER_PREFIX}{os.getpid()}_")
    return worker.FOLDER_PREFIX


def test_five_steps_with_a_proven_sync_tied(server: Server, model: str, tmp_path: Path, weight_folders: str) -> None:
    trainer = build(tmp_path, model, server.options.base_url)
    assert trainer.vllm_generation.vllm_client.way == "shared_memory"
    trainer.train()
    assert_proven(trainer, 5)
    assert not list(Path("/dev/shm").glob(f"{weight_folders}*"))


def test_a_stale_layer_is_caught_and_named(
    server: Server, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third sync on one layer is sent as it was at the second: every other tensor is right."""
    trainer = build(tmp_path, model, server.options.base_url)
    client = trainer.vllm_generation.vllm_client
    sent, old = [0], {}
    push = client.courier.push

    def stale(named_params: Any) -> Any:
        sent[0] += 1

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_params:
                if "layers.1.mlp.down_proj" in name:
                    tensor = old.setdefault(name, tensor.clone()) if sent[0] >= 2 else tensor
                yield name, tensor

        return push(stream())

    monkeypatch.setattr(client.courier, "push", stale)
    with pytest.raises(WeightSyncError, match=r"gap .* nats per token(.|\n)*layers\.1\.mlp\.down_proj\.weight"):
        trainer.train()
    assert trainer.state.global_step == 2  # the sync before the third step is the first that is stale


def test_completions_that_do_not_fit_the_server_are_refused_at_the_start(
    server: Server, model: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"max_completion_length. is 256.*context of 256.*--max-model-len"):
        build(tmp_path, model, server.options.base_url, max_completion_length=256)


def test_weights_that_are_not_this_run_s_are_caught(server: Server, model: str, tmp_path: Path) -> None:
    """Another run, or a restart behind the same address: the server answers, with other weights."""
    trainer = build(tmp_path, model, server.options.base_url)
    trainer.vllm_generation.sync_weights()

    class NoSync(TrainerCallback):  # a training begins with a sync, which would put it right
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer._last_loaded_step = state.global_step

    trainer.add_callback(NoSync())
    other = build(tmp_path / "other", model, server.options.base_url)
    other.vllm_generation.sync_weights()
    with pytest.raises(ServerGone, match=r"no longer holds this run's weights(.|\n)*nothing to save"):
        trainer.train()


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, -9999.0])
def test_a_log_prob_that_is_none_is_refused(value: float | None) -> None:
    check_answer([[[-0.5], [-1e-3]]])
    with pytest.raises(EngineFault, match="position 1 of completion 0"):
        check_answer([[[-0.5], [value]]])


def test_lora_is_merged_into_what_the_server_gets(server: Server, model: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = build(tmp_path, model, server.options.base_url, peft_config=lora, max_steps=4)
    trainer.train()
    assert_proven(trainer, 4)


def test_a_failed_push_leaves_merged_adapters_unmerged(
    server: Server, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL merges them while it streams and unmerges at the end of the stream: it must be read to its end."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = build(tmp_path, model, server.options.base_url, peft_config=lora)
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}

    def full(named_params: Any) -> None:
        next(iter(named_params))
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer.vllm_generation.vllm_client.courier, "push", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.vllm_generation.sync_weights()
    for name, tensor in trainer.model.named_parameters():
        torch.testing.assert_close(tensor, before[name], msg=name)


def test_a_server_killed_during_a_generation_leaves_a_checkpoint(
    server: Server, model: str, crashed: Path, weight_folders: str
) -> None:
    """Last of those that use the module's first server: the third generation is killed under way."""
    trainer = build(crashed, model, server.options.base_url, **LONG)
    times = kill_during(trainer.vllm_generation.vllm_client, 3, lambda: kill(server))
    with pytest.raises(ServerGone) as caught:
        trainer.train()
    assert 0 < times["failed"] - times["killed"] < 300  # under way when it was killed; and the wait ended
    checkpoint = crashed / "out" / "checkpoint-2"
    for needed in (server.options.base_url, "after", "checkpoint of step 2", str(checkpoint), "resume"):
        assert needed in str(caught.value), str(caught.value)
    assert (checkpoint / "optimizer.pt").is_file()
    kept = load_file(checkpoint / "model.safetensors")
    weights = trainer.model.state_dict()
    assert set(weights) - set(kept) <= {"lm_head.weight"}  # tied
    assert all(torch.equal(kept[name], weights[name]) for name in kept)
    assert not list(Path("/dev/shm").glob(f"{weight_folders}*"))


def test_the_run_resumes_against_a_new_server(new_server: Server, model: str, crashed: Path) -> None:
    if not (crashed / "out" / "checkpoint-2").is_dir():
        pytest.skip("the test before, which leaves the checkpoint, did not run")
    resumed = build(crashed, model, new_server.options.base_url, **LONG)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    assert_proven(resumed, 5)  # the first two rows come from the checkpoint
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [1, 2, 3, 4, 5]


def test_two_ranks_save_and_end_together(new_server: Server, model: str, tmp_path: Path) -> None:
    """Only rank 0 talks to the server. NaN in its second weights: both leave that step out. Killed in the fourth
    generation: both write the checkpoint and raise the same error."""
    assert new_server.process is not None
    spec = {"model": model, "url": new_server.options.base_url, "out": str(tmp_path)}
    spec |= {
        "server_pid": new_server.process.pid,
        "bad_push": 2,
        "kill_at": 4,
        "dead_url": f"http://127.0.0.1:{free_port()}",
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    run_worker(str(Path(__file__).with_name("server_runs")), "ddp", 2, tmp_path / "spec.json")
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["world"] for report in reports] == [2, 2]
    assert reports[0]["never_up"] == reports[1]["never_up"]
    assert "ServerGone: no vLLM server at" in reports[0]["never_up"]
    assert reports[0]["ended"] == reports[1]["ended"]
    assert reports[0]["ended"].startswith("ServerGone: the vLLM server at")
    assert "checkpoint of step 3" in reports[0]["ended"]
    assert [report["moved"] for report in reports] == [[True, False, True]] * 2
    assert logged(reports[0]["history"], "guard/log_prob") == [None, 1, 0]
    gaps = logged(reports[0]["history"], "rollout/sync_gap")
    assert gaps[1] is None  # NaN proves nothing: the next sync is proven
    assert max(gaps[0], gaps[2]) < 1e-4
    states = sorted(path.name for path in (tmp_path / "out" / "checkpoint-3").glob("rng_state_*.pth"))
    assert states == ["rng_state_0.pth", "rng_state_1.pth"]  # each rank wrote its part


def kill(server: Server) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def untied_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Started by the command, as a user does."""
    with served_from(tmp_path_factory.mktemp("untied"), architecture="qwen3", tie_embeddings=False) as running:
        yield running


@pytest.mark.thorough
def test_five_steps_with_a_proven_sync_untied(untied_server: Served, tmp_path: Path) -> None:
    trainer = build(tmp_path, untied_server.model, untied_server.url)
    trainer.train()
    assert_proven(trainer, 5)


def test_a_step_with_nan_from_the_server_is_left_out(untied_server: Served, tmp_path: Path) -> None:
    """The server cannot write NaN as JSON: completions are asked for once more without log-probs, and not trained
    on."""
    trainer = build(tmp_path, untied_server.model, untied_server.url, max_steps=4)
    client, moves = trainer.vllm_generation.vllm_client, Moves(trainer)
    poison(client.courier, "push", 2)
    trainer.train()
    assert moves.moved == [True, False, True, True]
    history = trainer.state.log_history
    for name in ("left_out", "log_prob"):
        assert logged(history, f"guard/{name}") == [None, 1, 0, 0]
    gaps = logged(history, "rollout/sync_gap")
    assert gaps[1] is None
    assert max(gaps[0], gaps[2], gaps[3]) < 1e-4
    facts, (tensors,) = read_bad_step(tmp_path / "out" / "bad_steps" / "step-000002")
    assert facts["not_finite"] == ["log_prob"]
    assert "log-prob that is NaN or infinite" in facts["of_rank"][0]["said"][0]
    assert tensors["completion_ids"].shape[0] == 8


def test_a_nan_log_prob_from_the_server_is_an_error(untied_server: Served, tmp_path: Path) -> None:
    """Without a guard. The last test of this server, whose cache keeps the NaN."""
    trainer = build(tmp_path, untied_server.model, untied_server.url, guard="off")
    poison(trainer.vllm_generation.vllm_client.courier, "push", 1)
    with pytest.raises(EngineFault, match="NaN"):
        trainer.train()


def test_a_server_that_is_never_up_ends_the_start_in_time(model: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(ServerGone, match=rf"no vLLM server at {url} within 2 s .*vllm_server_timeout.*grpo-lab serve"):
        build(tmp_path, model, url, vllm_server_timeout=2)
    assert time.monotonic() - begin < 300


def info(device: str, **changes: Any) -> dict[str, Any]:
    return {
        "device_config": {"device": device},
        "weight_transfer_config": {"backend": "nccl"} if device == "cuda" else None,
        "parallel_config": {"worker_extension_cls": "grpo_lab.engines.vllm.worker.WeightLoading"},
        **changes,
    }


@pytest.mark.parametrize(
    ("chosen", "trainer", "server", "way"),
    [
        ("auto", "cpu", "cpu", "shared_memory"),
        ("auto", "cuda", "cuda", "nccl"),
        ("auto", "cpu", "cuda", "shared_memory"),
        ("auto", "cuda", "cpu", "shared_memory"),
        ("shared_memory", "cuda", "cuda", "shared_memory"),  # one GPU for both, where NCCL refuses
    ],
)
def test_the_way_of_the_weights(chosen: str, trainer: str, server: str, way: str) -> None:
    assert server_client.weight_way(chosen, torch.device(trainer), info(server), "http://127.0.0.1:8000") == way


@pytest.mark.parametrize(
    ("chosen", "trainer", "server", "url", "message"),
    [
        ("nccl", "cpu", info("cpu"), "http://127.0.0.1:1", "needs a GPU on both sides"),
        ("auto", "cuda", info("cuda", weight_transfer_config=None), "http://127.0.0.1:1", "weight-transfer-config"),
        ("auto", "cpu", info("cpu", parallel_config={"worker_extension_cls": ""}), "http://127.0.0.1:1",
         "grpo-lab serve"),
        ("auto", "cpu", info("cpu"), "http://10.0.0.7:8000", "not on this machine"),
    ],
)  # fmt: skip
def test_no_way_for_the_weights_is_an_error(
    chosen: str, trainer: str, server: dict[str, Any], url: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        server_client.weight_way(chosen, torch.device(trainer), server, url)


@pytest.mark.parametrize(
    ("rollout", "mode", "message"),
    [
        ({"server": {"retries": 1}}, "colocate", r"rollout\.server.*vllm_mode: server"),
        ({"engine": {"dtype": "float32"}}, "server", r"rollout\.engine.*grpo-lab serve"),
        ({"server": {"retrys": 1}}, "server", "did you mean 'retries'"),
        ({"server": {"request_timeout": 0}}, "server", "seconds > 0"),
        ({"server": {"request_timeout": float("inf")}}, "server", "is inf; it must be a number of seconds > 0"),
        ({"tolerance": float("nan")}, "server", "`rollout.tolerance` is nan; it must be a number"),
        ({"server": {"weights": "pigeon"}}, "server", "must be 'auto', 'nccl' or 'shared_memory'"),
    ],
)
def test_settings_without_effect_are_refused(rollout: Any, mode: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LabConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_mode=mode, rollout=rollout)
