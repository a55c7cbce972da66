"""Clipped surrogates: PPO's, with separate ends and DAPO/INTELLECT's two-sided bound; the same without a clip; and
`LiteralRow`, what every surrogate's formula over single floats reads.

The start-up proof compares the loss in force with such a formula. A surrogate brings its own as a method ``literal(row,
t) -> float``, an aggregation class as ``literal(rows, denominators) -> float``; each counts only for the very class
that defines it (a subclass may change the tensors). Without one nothing is compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch


@dataclass(frozen=True)
class LiteralRow:
    """The tokens of one completion that carry loss, in order.

    Args:
        logps: log-probs in nats, one a token.
        old_logps: those that the ratio is taken against.
        log_ratios: log of the importance ratio at the objective's level, one a token.
        advantage: of the completion.
    """

    logps: list[float]
    old_logps: list[float]
    log_ratios: list[float]
    advantage: float


@dataclass(frozen=True)
class Clipped:
    """loss_t = −min(ρ·Â, clip(ρ, 1 − ε_low, 1 + ε_high)·Â), with ρ ≤ δ in the first term when ``delta`` is given.

    GRPO is the case ε_low = ε_high; DAPO's clip-higher (arXiv 2503.14476, §3.1) is 0.2 / 0.28; δ bounds the loss of a
    negative advantage (INTELLECT-2, arXiv 2505.07291, §3.4). With a sequence-level ratio: GSPO (arXiv 2507.18071).

    Args:
        epsilon: clip width downwards (ε_low), a fraction.
        epsilon_high: clip width upwards (ε_high); ``None`` means equal to ``epsilon``.
        delta: upper bound of ρ; above 1 + ε_high, where the clip ends.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"`epsilon` (low) is {self.epsilon}; it must lie in [0, 1]")
        if not self.high >= 0:
            raise ValueError(f"`epsilon_high` is {self.epsilon_high}; it must be ≥ 0")
        if self.delta is not None and not 1 + self.high < self.delta < math.inf:
            allowed = f"a finite number above 1 + `epsilon_high` = {1 + self.high:g}, or left out"
            raise ValueError(f"`delta` (upper bound of the ratio) is {self.delta}; it must be {allowed}")

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(self, batch: TokenBatch) -> Tensor:
        ratio = batch.ratio
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.high)
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        return -torch.min(bounded * batch.advantages, clipped * batch.advantages)

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Share of tokens (rows, for a sequence ratio) whose gradient the clip cut off; bool ``[B, T]`` or ``[B, 1]``.

        The first three are TRL's, which count nothing of what δ cuts off.
        """
        ratio = batch.ratio
        low = (ratio < 1 - self.epsilon) & (batch.advantages < 0)
        high = (ratio > 1 + self.high) & (batch.advantages > 0)
        found = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
        if self.delta is not None:
            found["clip_ratio/delta_mean"] = (ratio > self.delta) & (batch.advantages < 0)
        return found

    def literal(self, row: LiteralRow, t: int) -> float:
        """The formula over single floats."""
        ratio = math.exp(row.log_ratios[t])
        clipped = min(max(ratio, 1 - self.epsilon), 1 + self.high)
        bounded = ratio if self.delta is None else min(ratio, self.delta)
        return -min(bounded * row.advantage, clipped * row.advantage)


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
