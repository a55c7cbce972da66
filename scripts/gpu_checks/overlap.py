"""Section about a vLLM server and the trainer on one card, with weights through shared memory: generating one batch
ahead against waiting for it.

Both runs are ours, so that the quotient shows the overlap alone. The first two batches of a run are not counted. On one
card overlap gains less than on two, since kernels of one side wait for the other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_overlap import Clock

from gpu_checks.section import Row, Setting, below, faster, verdict
from gpu_checks.whole_step import GROUPS, model_folder, prompts, reward, stop_tokens
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.server import Server, ServerOptions
from grpo_lab.engines.weights.proof import tolerance_for

GROUP, SKIPPED = 8, 2


@dataclass
class Side:
    """One run: seconds of a batch, and of generation while the trainer waits for it; the log; and the ``way`` by which
    weights are sent."""

    batch: float
    generation: float
    history: list[dict[str, Any]]
    way: str

    def logged(self, name: str) -> list[float]:
        """Return all logged values of a metric."""
        return [row[name] for row in self.history if name in row]


def section(setting: Setting) -> Iterator[Row]:
    from ports import free_port

    model = model_folder(setting, shape_of(setting))
    engine = EngineOptions(kv_cache_gib=0.25 if setting.tiny else 4.0, max_model_len=128 + tokens_of(setting))
    options = ServerOptions(str(model), free_port(), engine, gpu_memory_utilization=0.3 if setting.gpu else None)
    server = Server(options, log=setting.own / "server.log", start_timeout=max(setting.left(), 1)).start()
    try:
        waiting = trained(setting, model, options.base_url, 0)
        yield {"side": "waits for each batch", "batch s": waiting.batch, "of it generation": waiting.generation}
        ahead = trained(setting, model, options.base_url, 1)
    finally:
        server.stop()
    yield verdict("way of the weights between two processes on one device", ahead.way, "shared_memory",
                  ahead.way == "shared_memory")  # fmt: skip
    ideal = waiting.batch / max(waiting.generation, waiting.batch - waiting.generation)
    columns = {"side": "one batch ahead", "batch s": ahead.batch, "of ideal": waiting.batch / ahead.batch / ideal}
    yield faster(setting, "a batch, waiting for it over one batch ahead", waiting.batch, ahead.batch, **columns)
    limit = tolerance_for(torch.bfloat16 if setting.gpu else torch.float32)
    gaps = waiting.logged("rollout/sync_gap") + ahead.logged("rollout/sync_gap")
    yield below("gap of the server's log-probs after a sync, nats a token", max(gaps), limit)
    stale = ahead.logged("rollout/staleness")
    yield verdict("steps by which completions are older than the policy", max(stale), "1", max(stale) == 1)


def trained(setting: Setting, model: Path, url: str, overlap: int) -> Side:
    """Train some batches with the server at ``url``, ``overlap`` batches ahead (0 or 1)."""
    settings = arguments(setting, url, overlap)
    trainer = LabTrainer(
        model=str(model),
        reward_funcs=reward,
        args=LabConfig(**settings),
        train_dataset=prompts(setting, GROUPS * settings["max_steps"], 64),
    )
    clock = Clock(trainer, passes=1)
    trainer.train()
    way = trainer.vllm_generation.vllm_client.way
    return Side(median(clock.batches[SKIPPED:]), median(clock.generations[SKIPPED:]), trainer.state.log_history, way)


def arguments(setting: Setting, url: str, overlap: int) -> dict[str, Any]:
    shape = shape_of(setting)
    return {
        "output_dir": str(setting.own / f"overlap-{overlap}"), "objective": "dr_grpo", "use_vllm": True,
        "vllm_mode": "server", "vllm_server_base_url": url, "vllm_importance_sampling_mode": "token_truncate",
        "rollout": {"overlap": overlap, "server": {"weights": "shared_memory"}}, "num_generations": GROUP,
        "generation_kwargs": {"stop_token_ids": stop_tokens(shape, 8 if setting.tiny else 128)},
        "per_device_train_batch_size": GROUPS * GROUP, "max_completion_length": tokens_of(setting),
        "max_steps": 4 if setting.tiny else 6, "learning_rate": 1e-6, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": not setting.gpu, "bf16": setting.gpu, "seed": 0,
    }  # fmt: skip


def shape_of(setting: Setting) -> str:
    return "tiny" if setting.tiny else "0.5B"


def tokens_of(setting: Setting) -> int:
    return 16 if setting.tiny else 256
