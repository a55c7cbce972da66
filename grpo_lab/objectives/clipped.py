"""Surrogates: PPO's clip, with separate ends and an upper bound (DAPO, INTELLECT-2); no clip; CISPO's clipped weight;
REINFORCE.

Also `LiteralRow`, the input of a surrogate's formula over single floats. At start-up the loss in force is compared with
such a formula. A surrogate brings its own as a method ``literal(row, t) -> float``, an aggregation class as
``literal(rows, denominators) -> float``. Each counts only for the very class that defines it (a subclass may change the
tensors). Without one nothing is compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, earlier_name


@earlier_name("old_logps", "proximal_logps")
@dataclass(frozen=True)
class LiteralRow:
    """One completion as plain floats: its tokens that carry loss, in order.

    Args:
        logps: log-probs in nats, one a token.
        proximal_logps: log-probs of the policy at the start of the batch's updates, the ratio's denominator.
        log_ratios: log of the importance ratio at the objective's level, one a token.
        advantage: the completion's.
        sampler_logps: log-probs with which the tokens were sampled.
        chosen: part → which tokens it chose (``objectives.Selecting``).
    """

    logps: list[float]
    proximal_logps: list[float]
    log_ratios: list[float]
    advantage: float
    sampler_logps: list[float] = field(default_factory=list)
    chosen: Mapping[str, list[bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Clipped:
    """loss_t = −min(ρ·Â, clip(ρ, 1 − ε_low, 1 + ε_high)·Â), with ρ ≤ δ in the first term when ``delta`` is given.

    GRPO is the case ε_low = ε_high; DAPO's clip-higher (arXiv 2503.14476, §3.1) is 0.2 / 0.28; δ bounds the loss of a
    negative advantage (INTELLECT-2, arXiv 2505.07291, as TRL has it). With a sequence-level ratio: GSPO (arXiv
    2507.18071).

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
        if self.epsilon_high is None:
            return self.epsilon
        return self.epsilon_high

    def __call__(self, batch: TokenBatch) -> Tensor:
        ratio = batch.ratio
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.high)
        if self.delta is None:
            bounded = ratio
        else:
            bounded = ratio.clamp(max=self.delta)
        return -torch.min(bounded * batch.advantages, clipped * batch.advantages)

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return for the log which tokens (rows, for a sequence ratio) lost their gradient to the clip: bool ``[B, T]``
        or ``[B, 1]``.

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
        """Compute the loss of token ``t`` with plain floats."""
        ratio = math.exp(row.log_ratios[t])
        clipped = min(max(ratio, 1 - self.epsilon), 1 + self.high)
        if self.delta is None:
            bounded = ratio
        else:
            bounded = min(ratio, self.delta)
        return -min(bounded * row.advantage, clipped * row.advantage)


@dataclass(frozen=True)
class Unclipped:
    """loss_t = −ρ_t · Â.

    Source: CS336 lecture 17 ("unclipped"); the surrogate of TRPO (arXiv 1502.05477, eq. 3) without its constraint.
    """

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.ratio * batch.advantages

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        return -math.exp(row.log_ratios[t]) * row.advantage


@dataclass(frozen=True)
class DetachedWeight:
    """CISPO, which keeps every token's gradient: loss_t = −sg(min(ρ_t, bound)) · Â · log π(y_t).

    Source: MiniMax-M1 (arXiv 2506.13585, eq. 4–5): only the upper end is tuned. As in TRL, ``bound`` is the *absolute*
    upper bound of the ratio (TRL's ``epsilon_high``), not 1 + ε. The paper's own value is undisclosed; ScaleRL (arXiv
    2510.13786, section A.17) sees no difference between 4, 5 and 8. TRL's default of 0.2 would damp every token.

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
        """Compute the loss of token ``t`` with plain floats."""
        return -min(math.exp(row.log_ratios[t]), self.bound) * row.advantage * row.logps[t]


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE, the score function times the advantage: loss_t = −Â · log π(y_t).

    Source: Williams 1992; CS336 lecture 17 ("naive"). No ratio: correct only while the data are on-policy, so with
    ``num_iterations`` > 1 the later passes are biased (that is the method, not a bug of it).
    """

    #: no importance ratio, hence no level of one
    reads_ratio: ClassVar[bool] = False

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.logps

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        return -row.advantage * row.logps[t]
