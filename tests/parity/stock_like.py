"""One training with real generation, by stock TRL or by ours, and the comparison of two of them.

``Case`` is a row of the table in ``test_drop_in.py``: what differs from the base configuration and from the base
constructor call. Everything a trainer might change (model, rewards, datasets, adapters) is made anew for each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from parity.harness import Run
from tolerance import metric_gap

#: wall time and what is derived from it
TIMED = ("step_time", "runtime", "samples_per_second", "steps_per_second")


@dataclass(frozen=True)
class Case:
    """One option of TRL's.

    Args:
        changes: of the configuration.
        call: ``folder → keyword arguments`` of the constructor (and ``model``, ``processing_class``), made for each
            run.
        model: which of the saved models (a key of the ``models`` fixture).
        dead_rows: some rows have advantage 0; they are skipped, and ``entropy`` is then a mean over fewer tokens.
        plain: run ours from a plain ``GRPOConfig`` as well.
        prepare: called with the constructed trainer.
        slow: more than the quick part of the suite should spend.
        left_to_trl: part of the reason why the loss stays TRL's own (``None``: it is ours).
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    call: Callable[[dict[str, Path]], dict[str, Any]] | None = None
    model: str = "text"
    dead_rows: bool = False
    plain: bool = False
    prepare: Callable[[Any], None] | None = None
    slow: bool = True
    left_to_trl: str | None = None


def prompts(n: int = 16) -> Dataset:
    words = ["Add", "Take", "Tell me", "What is"]
    return Dataset.from_dict(
        {"prompt": [f"{words[i % 4]} {i} {'and more ' * (i % 3)}!" for i in range(n)], "number": list(range(n))}
    )


def spread_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Many values by token ids, so that no group is dead and no reward is its group's mean (advantage 0)."""
    return [(sum(t * t * i for t, i in enumerate(ids, start=3)) % 9973) / 9972.0 for ids in completion_ids]


def base_arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 3,
        "learning_rate": 0.3,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 5,
        "disable_tqdm": True,
    }


def run(trainer_class: Any, config_class: Any, case: Case, models: dict[str, Path], folder: Path, **more: Any) -> Run:
    """Train by ``case``. ``more``: configuration of ours only (``update``)."""
    args = config_class(**{**base_arguments(folder), **case.changes, **more})
    call = {"reward_funcs": spread_reward, "train_dataset": prompts(), **(case.call(models) if case.call else {})}
    model = call.pop("model", None)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(models[case.model], dtype=torch.float32)
    processing = call.pop("processing_class", None) or AutoTokenizer.from_pretrained(models[case.model])
    resume = call.pop("resume", None)
    trainer = trainer_class(model=model, args=args, processing_class=processing, **call)
    start = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    if case.prepare is not None:
        case.prepare(trainer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
    steps = [row for row in trainer.state.log_history if "loss" in row]
    weights = {k: v.detach().clone() for k, v in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()}
    return Run(
        [row["loss"] for row in steps],
        [row["grad_norm"] for row in steps],
        weights,
        start,
        trainer.state.log_history,
        trainer,
    )


def metric_differences(ours: Run, stock: Run, without: tuple[str, ...] = ()) -> list[str]:
    """One line for each of stock's logged values that ours lacks or has differently (relative; absolute below 1)."""
    tolerance = metric_bound(stock.trainer.state.global_step)
    if len(ours.history) != len(stock.history):
        return [f"{len(stock.history)} rows logged by stock, {len(ours.history)} by ours"]
    lines = []
    for number, (mine, theirs) in enumerate(zip(ours.history, stock.history, strict=True)):
        for name, value in theirs.items():
            if name.endswith(TIMED) or name.removeprefix("eval_") in without:
                continue
            if name not in mine:
                lines.append(f"row {number}: {name} is missing (stock: {value})")
            elif not _close(mine[name], value, tolerance):
                lines.append(f"row {number}: {name} is {mine[name]!r}, stock has {value!r}")
    return lines


def metric_bound(steps: int) -> float:
    """Terms of size 1 (|Â|, nats relative to themselves), a step's mean over at most 24 rows of 10 tokens in
    float32."""
    return metric_gap(torch.float32, max(steps, 1), additions=24 * 10)


def _close(mine: Any, theirs: Any, tolerance: float) -> bool:
    if not isinstance(theirs, int | float) or not isinstance(mine, int | float):
        return bool(mine == theirs)
    if math.isnan(theirs):
        return math.isnan(mine)
    return abs(mine - theirs) <= tolerance * max(abs(theirs), 1.0)
