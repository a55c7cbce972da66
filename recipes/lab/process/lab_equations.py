"""Equations of a completion, as `EquationSteps` judges its lines: for the log of the arm that is not trained on them,
and for the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo_lab.rewards import EquationSteps
from grpo_lab.rewards.completion import completion_text


def equation_steps(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Share of a completion's equations that hold; None where it has none."""
    return [fmean(scores) if scores else None for scores in map(judged, completions)]


def equations(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """How many equations a completion has."""
    return [float(len(judged(one))) for one in completions]


def judged(completion: Any) -> list[float]:
    scores = EquationSteps().score_texts("", completion_text(completion).split("\n"))
    return [score for score in scores if score is not None]
