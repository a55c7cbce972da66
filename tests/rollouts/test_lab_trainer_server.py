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
