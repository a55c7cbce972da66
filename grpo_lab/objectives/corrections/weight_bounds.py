"""Bounds of a weight, and the ratio that they bound: of one token, or of a whole completion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from grpo_lab.batch import masked_sum

Level = Literal["token", "sequence"]


def check_high(high: float | None) -> None:
    """Raise ValueError unless the upper bound ``high`` is None or above 0: no weight or estimate could be below it."""
    if high is not None and not high > 0:
        raise ValueError(f"`correction.high` is {high}; it must be a number > 0")


@dataclass(frozen=True)
class WeightBounds:
    """The ratio ρ at a correction's level, and its bounds.

    Args:
        low: lower bound of the ratio; ``None`` for none.
        high: upper bound of the ratio; ``None`` for none.
    """

    low: float | None = None
    high: float | None = 3.0
    level: ClassVar[Level] = "token"

    def __post_init__(self) -> None:
        check_high(self.high)
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"`correction.low` is {self.low} and `correction.high` is {self.high}: low must be below")

    @property
    def ends(self) -> tuple[float, float]:
        """The bounds as numbers: −∞ and ∞ where there is none."""
        low = -math.inf
        high = math.inf
        if self.low is not None:
            low = self.low
        if self.high is not None:
            high = self.high
        return low, high

    def ratio(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return ρ_t ``[B, T]`` for the level ``token``, Π_t ρ_t ``[B, 1]`` for ``sequence``."""
        if self.level == "sequence":
            x = masked_sum(x, mask, dim=-1).unsqueeze(-1)
        return x.exp()

    def literal_ratio(self, steps: list[float], t: int) -> float:
        """Return the ratio in plain floats: of token ``t``, or for the level ``sequence`` of the whole response."""
        if self.level == "sequence":
            return math.exp(sum(steps))
        return math.exp(steps[t])
