"""Importance-weighted policy gradient without a trust region."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class Unclipped:
    """loss_t = −ρ_t · Â.

    Source: CS336 lecture 17 ("unclipped"); the surrogate of TRPO (arXiv 1502.05477, eq. 3) without its constraint.
    """

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.ratio * batch.advantages

    def literal(self, row: LiteralRow, t: int) -> float:
        """The formula over single floats."""
        return -math.exp(row.log_ratios[t]) * row.advantage
