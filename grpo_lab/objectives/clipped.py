"""PPO's clip, with separate ends and an upper bound (DAPO, INTELLECT-2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class Clipped:
    """PPO's clipped loss: loss_t = −min(ρ·Â, clip(ρ, 1 − ε_low, 1 + ε_high)·Â). With ``delta``, ρ of the first term is
    at most δ.

    Source: PPO (arXiv 1707.06347, eq. 7). GRPO has ε_low = ε_high; DAPO's clip-higher (arXiv 2503.14476, §3.1) has 0.2
    and 0.28; δ bounds the loss of a negative advantage (INTELLECT-2, arXiv 2505.07291, as TRL has it). With a
    sequence-level ratio this is GSPO (arXiv 2507.18071).

    Args:
        epsilon: clip width downwards (ε_low), a fraction.
        epsilon_high: clip width upwards (ε_high); ``None`` means equal to ``epsilon``.
        delta: upper bound of ρ in the first term; above 1 + ε_high, where the clip ends. ``None`` for no bound.
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
        """Return for the log which tokens (for a sequence ratio: rows) lost their gradient to the clip, bool ``[B, T]``
        or ``[B, 1]``.

        The first three metrics are TRL's. They do not count what δ cuts off; ``clip_ratio/delta_mean`` does.
        """
        ratio = batch.ratio
        low = (ratio < 1 - self.epsilon) & (batch.advantages < 0)
        high = (ratio > 1 + self.high) & (batch.advantages > 0)
        found = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
        if self.delta is not None:
            found["clip_ratio/delta_mean"] = (ratio > self.delta) & (batch.advantages < 0)
        return found

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        ratio = math.exp(row.log_ratios[t])
        clipped = min(max(ratio, 1 - self.epsilon), 1 + self.high)
        if self.delta is None:
            bounded = ratio
        else:
            bounded = min(ratio, self.delta)
        return -min(bounded * row.advantage, clipped * row.advantage)
