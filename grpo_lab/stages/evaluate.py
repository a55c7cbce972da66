"""Evaluate: a saved model on held-out rows, and the facts of it that later rounds, tables and pages read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lab.evaluation import EvaluationResult

EVALUATION = "evaluation"
"""Folder of the answers."""


def measured(result: EvaluationResult, folder: Path) -> dict[str, Any]:
    """``result`` written into ``folder``'s `evaluation/`, without its seconds, which no two runs share; its facts."""
    replace(result, seconds=None).write(folder / EVALUATION)
    return {
        "accuracy": result.accuracy.to_dict() if result.accuracy else None,
        "sampled_accuracy": result.sampled_accuracy.to_dict() if result.sampled_accuracy else None,
        "mean_length": result.mean_length,
        "mean_length_correct": result.mean_length_correct,
        "worked_out_share": result.worked_out_share,
    }
