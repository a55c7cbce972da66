"""GMPO: the geometric mean of a response's token ratios, each clipped by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, masked_row_mean, safe
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class GeometricMean:
    """GMPO's loss, one value for the whole response: loss_t = −Â · exp(1/|y| Σ_s c_s), from the geometric mean of
    clipped token ratios.

    c_s is the log-ratio of token s, clipped on the side to which Â pushes: min(log ρ_s, clip_high) where Â > 0, else
    max(log ρ_s, −clip_low). Without the clip this would be GSPO's ratio. On that side a single odd token cannot move
    the mean by more than its clip, and the other tokens keep their gradient. The authors' clip is wide: (e⁻⁰·⁴, e⁰·⁴).

    Source: GMPO (arXiv 2507.20673, eq. 4 and algorithm 1). The ratio is made here, from log π and log π_old of the
    tokens, so the level of ``batch.log_ratio`` has no effect. A sampler weight must be of the whole response. Where
    tokens have advantages of their own, each keeps its own sign and clip; the paper leaves that open.

    Args:
        clip_low: nats by which log ρ of a token may fall (Â < 0).
        clip_high: nats by which log ρ of a token may rise (Â > 0).
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    #: it makes the response's ratio itself
    reads_ratio: ClassVar[bool] = False
    whole_response: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`objective.{name}` is {getattr(self, name)}; it must be a finite number of nats ≥ 0")

    def _clipped(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return log ρ of each token before and after the clip, ``[B, T]`` each; 0 where masked."""
        moved = safe(batch.logps - batch.proximal_logps, batch.mask)
        held = moved.clamp(-self.clip_low, self.clip_high)
        return moved, torch.where(batch.advantages > 0, torch.min(moved, held), torch.max(moved, held))

    def __call__(self, batch: TokenBatch) -> Tensor:
        _, counted = self._clipped(batch)
        return -batch.advantages * masked_row_mean(counted, batch.mask).exp().unsqueeze(-1)

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return for the log which tokens lost their gradient to the clip, bool ``[B, T]``."""
        moved, counted = self._clipped(batch)
        lost = moved != counted
        low = lost & (batch.advantages < 0)
        high = lost & (batch.advantages > 0)
        return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        total = 0.0
        for new, old in zip(row.logps, row.proximal_logps, strict=True):
            if row.advantage > 0:
                total += min(new - old, self.clip_high)
            else:
                total += max(new - old, -self.clip_low)
        return -row.advantage * math.exp(total / len(row.logps))
