"""The end of a run, as the law of its first third has it: R = −a·exp(H) + b, of the entropy that the run has then.
And a target for the entropy that falls with the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerCallback

from grpo_lab.diagnostics.laws import entropy_law

H, R, TOKENS = "entropy", "rewards/accuracy_reward/mean", "rollout/generated"
Log = Sequence[Mapping[str, Any]]


def predicted(log: Log) -> list[tuple[float, float]]:
    """(generated tokens, R) after the first third of the rollouts; none where nothing can be fitted."""
    rows = [row for row in log if {H, R, TOKENS} <= row.keys()]
    try:
        law = entropy_law([(row[H], row[R]) for row in rows])
    except ValueError:  # fewer than three rollouts, or all of one entropy
        return []
    return [(row[TOKENS], law.at(row[H]).value) for row in rows[math.ceil(len(rows) / 3) :]]


def predicted_end(_: Any, log: Log) -> float:
    """The mean of the last quarter's, beside that of what was measured then."""
    values = [value for _, value in predicted(log)]
    rollouts = sum(R in row for row in log)
    return fmean(values[-max(1, rollouts // 4) :]) if values else math.nan


class AnnealedTarget(TrainerCallback):
    """Before each optimizer step: the target goes in a straight line from the recipe's to ``end`` (nats a token), which
    it has with the last step."""

    def __init__(self, end: float) -> None:
        self.start, self.end = math.nan, end

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = args.entropy_target

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gone = state.global_step / max(1, state.max_steps - 1)
        args.entropy_target = self.start + (self.end - self.start) * gone
