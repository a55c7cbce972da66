"""Reward weights as functions of the optimizer step (``reward_schedules``), logged as ``reward_weights/<name>``.

A schedule keeps no state: a resumed run has at step t the weight that the uninterrupted run had there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from grpo_lab.nearest import one_of
from grpo_lab.rewards.schedules import Schedule

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


class WeightSchedules:
    """Sets the trainer's ``reward_weights`` before every generation batch, and logs what is in force."""

    def __init__(self, trainer: StepPort, schedules: Mapping[str, Schedule]) -> None:
        names = list(trainer.reward_func_names)
        for name in schedules:
            if name not in names:
                raise ValueError(f"`reward_schedules` names {name!r}, which no reward has{one_of(name, names)}")
            if names.count(name) > 1:
                raise ValueError(f"`reward_schedules` names {name!r}, which {names.count(name)} rewards share: {names}")
            _refuse_double(trainer, names.index(name), name)
        self.trainer = trainer
        self._columns = {names.index(name): schedule for name, schedule in schedules.items()}
        self._own = {
            column: reward.weight_at
            for column, reward in enumerate(trainer.reward_funcs)
            if hasattr(reward, "weight_at")
        }

    def apply(self) -> None:
        """The weights of the batch that is about to be generated; ``step`` = optimizer steps done."""
        trainer, step = self.trainer, self.trainer.state.global_step
        in_force = {column: schedule(step) for column, schedule in self._columns.items()}
        for column, weight in in_force.items():
            trainer.reward_weights[column] = weight
        fixed = trainer.reward_weights.tolist()
        logged = in_force | {column: fixed[column] * weight_at(step) for column, weight_at in self._own.items()}
        book = trainer.recorder.book("train" if trainer.model.training else "eval")
        for column, weight in logged.items():
            book.add_alike(f"reward_weights/{trainer.reward_func_names[column]}", torch.tensor([weight]), 1)


def _refuse_double(trainer: StepPort, column: int, name: str) -> None:
    """One weight, one place that says it."""
    if hasattr(trainer.reward_funcs[column], "weight_at"):
        raise ValueError(
            f"`reward_schedules.{name}` is set, but that reward carries a weight and a warm-up of its own: set them there "
            f"({type(trainer.reward_funcs[column]).__name__}(weight=…, warmup_steps=…))"
        )
    if trainer.args.reward_weights is not None and trainer.args.reward_weights[column] != 1.0:
        raise ValueError(
            f"`reward_weights` gives {name!r} the weight {trainer.args.reward_weights[column]}, and `reward_schedules` "
            "gives it a schedule: two names for one number; set one"
        )
