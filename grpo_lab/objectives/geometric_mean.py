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
    """loss_t = −Â · exp(1/|y| Σ_s c_s), c_s = min or max(log ρ_s, clip(log ρ_s, −c_low, c_high)), for Â > 0 and Â < 0:
    one loss for the whole response.

    GSPO's ratio with a clip that acts on tokens: a single odd token cannot move the mean by more than its clip, and the
    others keep their gradient. The clip is wide: (e⁻⁰·⁴, e⁰·⁴).

    Source: GMPO (arXiv 2507.20673, eq. 4 and algorithm 1). It makes the ratio of the response itself from log π and log
    π_old of its tokens, so the level of ``batch.log_ratio`` has no effect, and a sampler weight must be of the whole
    response. With an advantage per token each keeps its own sign and clip, which the paper leaves open.

    Args:
        clip_low: nats by which log ρ of a token may fall (Â < 0).
        clip_high: nats by which it may rise (Â > 0).
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
        """Return log ρ of the tokens, and as it counts, ``[B, T]``; 0 where masked."""
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
        """Compute the loss of token ``t`` with plain floats."""
        total = 0.0
        for new, old in zip(row.logps, row.proximal_logps, strict=True):
            if row.advantage > 0:
                total += min(new - old, self.clip_high)
            else:
                total += max(new - old, -self.clip_low)
        return -row.advantage * math.exp(total / len(row.logps))
