"""Evaluation: how good a model is, and what a run did to it. Accuracy with intervals, pass@k, maj@k; reports."""

from __future__ import annotations

import warnings
from typing import Any

from grpo_lab.engines.generators import Completion, CompletionGenerator, TransformersGenerator
from grpo_lab.evaluation.measure import EvaluationStopped, evaluate
from grpo_lab.evaluation.outcomes import Outcome
from grpo_lab.evaluation.result import EvaluationResult, paired_gain
from grpo_lab.evaluation.run_page import write_report
from grpo_lab.evaluation.statistics import Interval, majority_at_k, paired_difference, pass_at_k, wilson_interval
from grpo_lab.evaluation.terminal import headline, terminal_summary

__all__ = [
    "Completion",
    "CompletionGenerator",
    "EvaluationResult",
    "EvaluationStopped",
    "Interval",
    "Outcome",
    "TransformersGenerator",
    "evaluate",
    "headline",
    "majority_at_k",
    "paired_difference",
    "paired_gain",
    "pass_at_k",
    "terminal_summary",
    "wilson_interval",
    "write_report",
]

_EARLIER_NAMES = {"Sampler": CompletionGenerator, "TransformersSampler": TransformersGenerator}


def __getattr__(name: str) -> Any:
    """Return the generator class that replaced ``Sampler`` or ``TransformersSampler``, with a DeprecationWarning.
    Raises AttributeError for any other name."""
    if name not in _EARLIER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind = _EARLIER_NAMES[name]
    warnings.warn(f"`{name}` is now called `{kind.__name__}`", DeprecationWarning, stacklevel=2)
    return kind
