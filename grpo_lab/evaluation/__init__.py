"""How good is a model, and what did a run do to it: accuracy with intervals, pass@k, maj@k; reports."""

from grpo_lab.engines.sampler import Completion, Sampler, TransformersSampler
from grpo_lab.evaluation.measure import EvaluationStopped, evaluate
from grpo_lab.evaluation.result import EvaluationResult, Outcome, paired_gain
from grpo_lab.evaluation.run_page import write_report
from grpo_lab.evaluation.terminal import headline, terminal_summary

__all__ = ["Completion", "EvaluationResult", "EvaluationStopped", "Outcome", "Sampler", "TransformersSampler"]
__all__ += ["evaluate", "headline", "paired_gain", "terminal_summary", "write_report"]
