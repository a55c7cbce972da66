"""Importance-weighted policy gradient without a trust region."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.batch import TokenBatch


@dataclass(frozen=True)
class Unclipped:
    """loss_t = −ρ_t · Â.

    Source: CS336 lecture 17 ("unclipped"); the surrogate of TRPO (arXiv 1502.05477, eq. 3) without its constraint.
    """

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.ratio * batch.advantages
