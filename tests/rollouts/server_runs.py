"""A short training against a vLLM server, and a server that is killed while a generation is under way.

Run as a script by ``accelerate launch`` (several ranks): ``server_runs.py spec.json`` with ``{"model", "url",
"dead_url", "out", "server_pid", "bad_push", "kill_at"}``; each rank writes ``rank-<r>.json``: the errors that ended its
start at the dead address and its run, and what it logged.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer


def odd_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def build(folder: Path, model: str, url: str, peft_config: Any = None, **changes: Any) -> LabTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "objective": "dr_grpo",
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 300,
        "rollout": {"verify_every": 1, "server": {"retries": 1, "backoff": 0.1, "request_timeout": 600}},
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16, "max_steps": 5,
        "learning_rate": 5e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"Tom has {n} apples. How many?" for n in range(32)]})
    return LabTrainer(
        model=model,
        reward_funcs=odd_share,
        args=LabConfig(**{**settings, **changes}),
        train_dataset=rows,
        peft_config=peft_config,
    )


def kill_during(client: Any, generation: int, kill: Callable[[], None], after: float = 0.1) -> dict[str, float]:
    """Kill ``after`` seconds after the run's request number ``generation`` was sent -> times of the kill and of the
    failure."""
    generate, calls, times = client.generate, [0], {}

    def killed() -> None:
        times["killed"] = time.monotonic()
        kill()

    def generate_and_kill(*args: Any, **arguments: Any) -> Any:
        if arguments["n"] > 1:  # the run's own, not a probe of the proof
            calls[0] += 1
        if calls[0] != generation:
            return generate(*args, **arguments)
        threading.Timer(after, killed).start()
        try:
            return generate(*args, **arguments)
        finally:
            times["failed"] = time.monotonic()

    client.generate = generate_and_kill
    return times


def poison(owner: Any, name: str, bad: int) -> None:
    """Weights of one layer that float32 just holds, and whose products are NaN, in the ``bad``-th sync alone.
    ``owner.name(…, named_params)`` sends them."""
    push, pushes = getattr(owner, name), [0]

    def pushed(*args: Any) -> Any:
        pushes[0] += 1
        if pushes[0] == bad:
            *args, named = args
            args = [*args, ((n, t / t.abs().max() * 3e38 if "layers.0.mlp.up" in n else t) for n, t in named)]
        return push(*args)

    setattr(owner, name, pushed)


class Moves(TrainerCallback):
    """Whether each optimizer step moved this rank's weights."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer, self.moved, self._before = trainer, [], torch.zeros(())
        trainer.add_callback(self)

    def _weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.trainer.model.parameters()])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._before = self._weights()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = self._weights()
        assert now.isfinite().all()
        self.moved.append(not torch.equal(now, self._before))


def logged(history: list[dict[str, Any]], name: str) -> list[float | None]:
    return [row.get(name) for row in history if "loss" in row]


def assert_proven(trainer: LabTrainer, steps: int) -> None:
    """The sync of each step was proven, and each was trained on."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == steps
    assert max(row["rollout/sync_gap"] for row in rows) < 1e-4  # a proof at every step, or this is a KeyError
    name = "sampling/sampling_logp_difference/mean"  # of a step whose groups are all dead there is none
    assert max(row[name] for row in rows if name in row) < 1e-4
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)


def outcome(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text())
    never_up = outcome(lambda: build(Path(spec["out"]), spec["model"], spec["dead_url"], vllm_server_timeout=1))
    trainer = build(Path(spec["out"]), spec["model"], spec["url"], max_completion_length=100)
    moves = Moves(trainer)
    if trainer.accelerator.is_main_process:
        poison(trainer.vllm_generation.vllm_client.courier, "push", spec["bad_push"])
        kill_during(
            trainer.vllm_generation.vllm_client, spec["kill_at"], lambda: os.killpg(spec["server_pid"], signal.SIGKILL)
        )
    ended = outcome(trainer.train)
    report = {
        "world": trainer.accelerator.num_processes,
        "never_up": never_up,
        "ended": ended,
        "moved": moves.moved,
        "history": trainer.state.log_history,
    }
    (Path(spec["out"]) / f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
