"""``LabTrainer`` with ``vllm_mode: server``: a real vLLM in a second process, weights through shared memory, planted faults.

One server serves most of the module: another run's weights replace the last run's at its first sync.
"""

from __future__ import annotations

import functools
import math
import os
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

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rollouts.engine import EngineOptions
from grpo_lab.rollouts.grouping import EngineFault
from grpo_lab.rollouts.server import Server, ServerGone, ServerOptions
from grpo_lab.rollouts.sync import WeightSyncError
from grpo_lab.testing import tiny_model
from grpo_lab.trainer import server_client
from rollouts.test_server import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("vllm")]


def odd_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], str]:
    """(architecture, tied) -> folder of a tiny model with heads of 32, the smallest that vLLM's CPU kernels have."""

    @functools.cache
    def saved(architecture: str, tied: bool) -> str:
        folder = tmp_path_factory.mktemp(architecture)
        model, tokenizer = tiny_model(architecture, hidden_size=64, num_heads=2, num_layers=2, tie_embeddings=tied)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return saved


def start(model: str, folder: Path) -> Server:
    engine = EngineOptions(kv_cache_gib=0.125, max_model_len=256)
    return Server(ServerOptions(model, free_port(), engine), log=folder / "server.log", start_timeout=300).start()


@pytest.fixture(scope="module")
def server(models: Callable[[str, bool], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(models("qwen2", True), tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


def build(folder: Path, model: str, url: str, **changes: Any) -> LabTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "objective": "dr_grpo",
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 30,
        "rollout": {"verify_every": 1, "server": {"retries": 1, "backoff": 0.1, "request_timeout": 60}},
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16, "max_steps": 5,
        "learning_rate": 5e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"Tom has {n} apples. How many?" for n in range(32)]})
    return LabTrainer(
        model=model, reward_funcs=odd_share, args=LabConfig(**{**settings, **changes}), train_dataset=rows
    )


def assert_proven(trainer: LabTrainer, steps: int) -> None:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == steps
    assert max(row["rollout/sync_gap"] for row in rows) < 1e-4  # a proof at every step, or this is a KeyError
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)


def test_five_steps_with_a_proven_sync_tied(server: Server, models: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path, models("qwen2", True), server.options.base_url)
    assert trainer.vllm_generation.vllm_client.way == "shared_memory"
    trainer.train()
    assert_proven(trainer, 5)
    assert not list(Path("/dev/shm").glob("grpo-lab-weights-*"))


def test_a_stale_layer_is_caught_and_named(
    server: Server, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third sync on one layer is sent as it was at the second: every other tensor is right."""
    trainer = build(tmp_path, models("qwen2", True), server.options.base_url)
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


def test_weights_that_are_not_this_run_s_are_caught(server: Server, models: Any, tmp_path: Path) -> None:
    """Another run, or a restart behind the same address: the server answers, with other weights."""
    trainer = build(tmp_path, models("qwen2", True), server.options.base_url)
    trainer.vllm_generation.sync_weights()
    trainer._last_loaded_step = 0
    other = build(tmp_path / "other", models("qwen2", True), server.options.base_url)
    other.vllm_generation.sync_weights()
    with pytest.raises(ServerGone, match=r"no longer holds this run's weights(.|\n)*nothing to save"):
        trainer.train()


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, -9999.0])
def test_a_log_prob_that_is_none_is_refused(value: float | None) -> None:
    server_client.check_answer([[[-0.5], [-1e-3]]])
    with pytest.raises(EngineFault, match="position 1 of completion 0"):
        server_client.check_answer([[[-0.5], [value]]])


def test_a_server_killed_during_a_generation_leaves_a_checkpoint_and_the_run_resumes(
    server: Server, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last of those that use the module's server. The third generation is killed under way, and goes on elsewhere."""
    model, long = models("qwen2", True), {"max_completion_length": 100}
    trainer = build(tmp_path, model, server.options.base_url, **long)
    client = trainer.vllm_generation.vllm_client
    generate, calls, seen = client.generate, [0], {}

    def generate_and_kill(prompts: Any, **arguments: Any) -> Any:
        if arguments["n"] > 1:  # the run's own, not a probe of the proof
            calls[0] += 1
        if calls[0] == 3:
            killer = threading.Timer(0.1, lambda: (seen.update(killed=time.monotonic()), kill(server)))
            killer.start()
            try:
                return generate(prompts, **arguments)
            finally:
                seen["failed"] = time.monotonic()
        return generate(prompts, **arguments)

    monkeypatch.setattr(client, "generate", generate_and_kill)
    with pytest.raises(ServerGone) as caught:
        trainer.train()
    assert 0 < seen["failed"] - seen["killed"] < 30  # under way when it was killed; and the wait ended
    checkpoint = tmp_path / "out" / "checkpoint-2"
    for needed in (server.options.base_url, "after", "checkpoint of step 2", str(checkpoint), "resume"):
        assert needed in str(caught.value), str(caught.value)
    assert (checkpoint / "optimizer.pt").is_file()
    assert not list(Path("/dev/shm").glob("grpo-lab-weights-*"))
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    replacement = start(model, tmp_path)
    try:
        resumed = build(tmp_path, model, replacement.options.base_url, **long)
        resumed.train(resume_from_checkpoint=True)
    finally:
        replacement.stop()
    assert resumed.state.global_step == 5
    rows = [row for row in resumed.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]  # 1 and 2 come from the checkpoint
    assert all(row["rollout/sync_gap"] < 1e-4 for row in rows)
    from safetensors.torch import load_file

    kept = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights.items() if name in kept)


def kill(server: Server) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def untied_server(models: Callable[[str, bool], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(models("qwen3", False), tmp_path_factory.mktemp("untied_server"))
    yield running
    running.stop()


def test_five_steps_with_a_proven_sync_untied(untied_server: Server, models: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path, models("qwen3", False), untied_server.options.base_url)
    trainer.train()
    assert_proven(trainer, 5)


def test_a_nan_log_prob_from_the_server_is_an_error(
    untied_server: Server, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN weight in the server only; the last test of this server, whose cache keeps the NaN."""
    trainer = build(tmp_path, models("qwen3", False), untied_server.options.base_url)
    client = trainer.vllm_generation.vllm_client
    push = client.courier.push

    def poisoned(named_params: Any) -> Any:
        return push((name, t * math.nan if "layers.0.mlp.up" in name else t) for name, t in named_params)

    monkeypatch.setattr(client.courier, "push", poisoned)
    with pytest.raises(EngineFault, match="NaN"):
        trainer.train()


def test_a_server_that_is_never_up_ends_the_start_in_time(models: Any, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(ServerGone, match=rf"no vLLM server at {url} within 2 s .*vllm_server_timeout.*grpo-lab serve"):
        build(tmp_path, models("qwen2", True), url, vllm_server_timeout=2)
    assert time.monotonic() - begin < 10


def info(device: str, **changes: Any) -> dict[str, Any]:
    return {
        "device_config": {"device": device},
        "weight_transfer_config": {"backend": "nccl"} if device == "cuda" else None,
        "parallel_config": {"worker_extension_cls": "grpo_lab.rollouts.server_worker.WeightLoading"},
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
        ("auto", "cpu", info("cpu", parallel_config={"worker_extension_cls": ""}), "http://127.0.0.1:1", "grpo-lab serve"),
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
        ({"server": {"weights": "pigeon"}}, "server", "must be one of"),
    ],
)
def test_settings_without_effect_are_refused(rollout: Any, mode: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LabConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_mode=mode, rollout=rollout)
