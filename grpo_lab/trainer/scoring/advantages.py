"""What a generation batch was scored with, for the log; and advantages as the loss may have them."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from grpo_lab.batch import RewardTable
from grpo_lab.trainer.metrics.book import reward_metrics
from grpo_lab.trainer.scoring.reward_table import Scored, correctness
from grpo_lab.trainer.settings.inputs import completion_limit

TRUNCATION_WARNING = 0.20


def checked_advantages(advantages: Tensor, table: RewardTable) -> Tensor:
    """One finite number per row of the table, or ``ValueError``."""
    if advantages.shape[:1] != table.values.shape[:1] or not advantages.isfinite().all():
        raise ValueError(
            f"the advantage rule returned shape {tuple(advantages.shape)} (finite: {bool(advantages.isfinite().all())}) "
            f"for {table.values.size(0)} rewards; it must return one finite number per row (`advantage`)"
        )
    return advantages


def record_scores(trainer: Any, scored: Scored) -> None:
    """Dead groups, lengths and correctness of a generation batch into the book; many cut completions are said once."""
    table = scored.table
    correct = correctness(table, trainer.reward_funcs)
    reward_metrics(trainer.recorder.book(), scored.dead, scored.lengths, scored.truncated, correct)
    share = scored.truncated.float().mean().item()
    if trainer.recorder.mode() == "train" and share > TRUNCATION_WARNING:
        trainer.recorder.say(
            f"{share:.0%} of the completions were cut at max_completion_length={completion_limit(trainer.args)} tokens "
            "(warned above 20%): cut answers count as wrong; raise the limit, or expect a length bias",
            key="truncated",
            level=logging.WARNING,
        )


__all__ = ["checked_advantages", "record_scores"]
