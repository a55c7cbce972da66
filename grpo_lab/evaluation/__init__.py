"""Evaluation: how good a model is, and what a run did to it. Accuracy with intervals, pass@k, maj@k; reports."""

from grpo_lab.engines.generators import Completion, Sampler, TransformersSampler
from grpo_lab.evaluation.measure import EvaluationStopped, evaluate
from grpo_lab.evaluation.result import EvaluationResult, Outcome, paired_gain
from grpo_lab.evaluation.run_page import write_report
from grpo_lab.evaluation.statistics import Interval, majority_at_k, paired_difference, pass_at_k, wilson_interval
from grpo_lab.evaluation.terminal import headline, terminal_summary

__all__ = [
    "Completion",
    "EvaluationResult",
    "EvaluationStopped",
    "Interval",
    "Outcome",
    "Sampler",
    "TransformersSampler",
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
