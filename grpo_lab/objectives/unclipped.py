"""Surrogates without a clip that stops a gradient: the plain ratio, CISPO's bounded weight, REINFORCE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class Unclipped:
    """The plain importance-weighted loss: loss_t = −ρ_t · Â.

    Source: CS336 lecture 17 ("unclipped"); the surrogate of TRPO (arXiv 1502.05477, eq. 3) without its constraint.
    """

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.ratio * batch.advantages

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        return -math.exp(row.log_ratios[t]) * row.advantage


@dataclass(frozen=True)
class DetachedWeight:
    """CISPO, in which every token keeps a gradient: loss_t = −sg(min(ρ_t, bound)) · Â · log π(y_t). sg stops the
    gradient.

    Source: MiniMax-M1 (arXiv 2506.13585, eq. 4–5), where only the upper end is tuned. As in TRL, ``bound`` is the
    *absolute* upper bound of the ratio (TRL's ``epsilon_high``), not 1 + ε. The paper's own value is undisclosed;
    ScaleRL (arXiv 2510.13786, section A.17) sees no difference between 4, 5 and 8. TRL's default of 0.2 would damp
    every token.

    Args:
        epsilon: the bound where ``epsilon_high`` is ``None``; > 0.
        epsilon_high: the bound; > 0.
    """

    epsilon: float = 5.0
    epsilon_high: float | None = None

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"`epsilon_high` (cispo's upper bound of the ratio) is {self.bound}; it must be > 0")

    @property
    def bound(self) -> float:
        """The upper bound of the weight."""
        if self.epsilon_high is None:
            return self.epsilon
        return self.epsilon_high

    def __call__(self, batch: TokenBatch) -> Tensor:
        weight = batch.ratio.clamp(max=self.bound).detach()
        return -weight * batch.advantages * batch.logps

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return which tokens of positive advantage had their weight cut, bool ``[B, T]`` or ``[B, 1]``."""
        return {"cispo_clip_ratio": (batch.ratio > self.bound) & (batch.advantages > 0)}

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        return -min(math.exp(row.log_ratios[t]), self.bound) * row.advantage * row.logps[t]


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE, the score function times the advantage: loss_t = −Â · log π(y_t).

    Source: Williams 1992; CS336 lecture 17 ("naive"). It has no importance ratio, so it is correct only while the data
    are on-policy: with ``num_iterations`` > 1 the later passes are biased (by the method, not by a bug).
    """

    #: no importance ratio, hence no level of one
    reads_ratio: ClassVar[bool] = False

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.logps

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        return -row.advantage * row.logps[t]
