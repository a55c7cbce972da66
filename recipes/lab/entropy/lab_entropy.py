"""The end of a run, as the law of its first third has it: R = −a·exp(H) + b, of the entropy that the run has then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

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
