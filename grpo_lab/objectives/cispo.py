"""CISPO: clip the weight, keep every token's gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.clipped import LiteralRow


@dataclass(frozen=True)
class DetachedWeight:
    """loss_t = −sg(min(ρ_t, bound)) · Â · log π(y_t).

    Source: MiniMax-M1 (arXiv 2506.13585, eq. 4–5): only the upper end is tuned. As in TRL, ``bound`` is the *absolute*
    upper bound of the ratio (TRL's ``epsilon_high``), not 1 + ε; the paper's own value is undisclosed, ScaleRL
    (arXiv 2510.13786) uses 5. TRL's default of 0.2 would damp every token.

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
        """The largest weight."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(self, batch: TokenBatch) -> Tensor:
        weight = batch.ratio.clamp(max=self.bound).detach()
        return -weight * batch.advantages * batch.logps

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Tokens of positive advantage whose weight was cut, bool ``[B, T]`` or ``[B, 1]``."""
        return {"cispo_clip_ratio": (batch.ratio > self.bound) & (batch.advantages > 0)}

    def literal(self, row: LiteralRow, t: int) -> float:
        """The formula over single floats."""
        return -min(math.exp(row.log_ratios[t]), self.bound) * row.advantage * row.logps[t]
