"""Corrections that cut a weight off at a bound, and keep every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.batch import masked_sum
from grpo_lab.objectives.corrections.weight_bounds import Level, WeightBounds, check_high
from grpo_lab.objectives.objective import Gather


@dataclass(frozen=True)
class TokenTruncate(WeightBounds):
    """Truncate the ratio of each token at the bounds: w_t = min(max(ρ_t, low), high).

    Source: TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"); bounds as
    TRL 1.16's ``vllm_importance_sampling_mode: token_truncate``.
    """

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        low, high = self.ends
        return self.ratio(x, mask).clamp(min=low, max=high)

    def keeps(self, weights: Tensor) -> Tensor:
        """Return bool of the shape of ``weights``: those that no bound has changed."""
        low, high = self.ends
        return (weights > low) & (weights < high)

    def literal(self, steps: list[float], t: int) -> float:
        low, high = self.ends
        return min(max(self.literal_ratio(steps, t), low), high)


@dataclass(frozen=True)
class SequenceTruncate(TokenTruncate):
    """Truncate the ratio of the whole completion at the bounds: w = min(max(Π_t ρ_t, low), high). Source: as
    ``TokenTruncate``."""

    level: ClassVar[Level] = "sequence"


@dataclass(frozen=True)
class TIS(TokenTruncate):
    """Truncate the ratio of each token from above: w_t = min(ρ_t, high), with high = 2 as in verl. Source: as
    ``TokenTruncate``; verl's ``rollout_is: token``."""

    high: float | None = 2.0


@dataclass(frozen=True)
class BatchNormalised:
    """Truncate ratios from above and divide them by their mean over the generation batch of all ranks, so that the mean
    weight is 1.

        w = min(ρ, high) / mean of min(ρ, high)

    A mean of at most 1e-8 is not divided by. Source: verl's rollout correction, ``rollout_is_batch_normalize``.

    Args:
        per: ``token``: ρ_t of each token, averaged over loss tokens. ``sequence``: Π_t ρ_t, averaged over completions.
        high: upper bound of the ratio.
    """

    per: Level = "token"
    high: float = 2.0
    whole_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_high(self.high)
        if self.per not in ("token", "sequence"):
            raise ValueError(f"`correction.per` is {self.per!r}; it must be 'token' or 'sequence'")

    @property
    def level(self) -> Level:
        return self.per

    @property
    def bounded(self) -> TokenTruncate:
        """The weights before they are divided by their mean."""
        if self.per == "sequence":
            return SequenceTruncate(high=self.high)
        return TokenTruncate(high=self.high)

    def __call__(self, x: Tensor, mask: Tensor, gather: Gather) -> Tensor:
        weights = self.bounded(x, mask)
        counted = mask
        if self.per == "sequence":
            counted = mask.any(dim=1, keepdim=True)
        own = torch.stack([masked_sum(weights, counted), counted.sum().to(weights.dtype)])
        total, count = gather(own).view(-1, 2).sum(0)
        mean = total / count.clamp(min=1)
        return weights / torch.where(mean > 1e-8, mean, 1.0)

    def literal(self, rows: list[list[float]], row: int, t: int) -> float:
        """Return the weight of token ``t`` of ``rows[row]`` in plain floats; ``rows`` are the x of all ranks' rows."""
        weights = []
        for steps in rows:
            of_row = [self.bounded.literal(steps, place) for place in range(len(steps))]
            if self.per == "sequence":
                of_row = of_row[:1]  # one weight a completion
            weights += of_row
        return self.bounded.literal(rows[row], t) * len(weights) / sum(weights)
