"""Trust regions around the sampler: a token whose probability has moved too far from the one with which it was sampled
no longer moves further.

The ratio here is π/μ, μ being what sampled the token (``TokenBatch.sampler_logps``): the engine's own log-probs, or
the proximal policy's where there is no engine. So mismatch and staleness are in it already. A sampler correction is not
multiplied on top, and the level of ``batch.log_ratio`` has no effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class WithinRegion:
    """What both divergences share; ``_far`` of a subclass says how far the tokens have moved."""

    threshold_low: float
    threshold_high: float | None = None
    truncate: float | None = None

    #: its ratio is against the sampler, whose correction is in it
    against_sampler: ClassVar[bool] = True
    applies_correction: ClassVar[bool] = True
    reads_ratio: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("threshold_low", "threshold_high"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"`objective.{name}` is {value}; it must be a finite number ≥ 0")
        if self.truncate is not None and not 1 <= self.truncate < math.inf:
            raise ValueError(f"`objective.truncate` is {self.truncate}; it must be a finite number ≥ 1, or left out")

    @property
    def high(self) -> float:
        if self.threshold_high is None:
            return self.threshold_low
        return self.threshold_high

    def _far(self, logps: Tensor, sampled: Tensor) -> Tensor:
        raise NotImplementedError

    def outside(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the tokens that would move on outwards, bool ``[B, T]`` each: too unlikely already with Â < 0, too
        likely with Â > 0."""
        logps = batch.logps.detach()
        sampled = batch.sampler_logps
        far = self._far(logps, sampled)
        low = (far > self.threshold_low) & (logps < sampled) & (batch.advantages < 0)
        high = (far > self.high) & (logps > sampled) & (batch.advantages > 0)
        return low, high

    def __call__(self, batch: TokenBatch) -> Tensor:
        low, high = self.outside(batch)
        moved = batch.logps - batch.sampler_logps
        ratio = moved.exp()
        if self.truncate is not None:
            weight = ratio.detach().clamp(max=self.truncate)
            ratio = weight * (batch.logps - batch.logps.detach()).exp()
        return -ratio.masked_fill(low | high, 0.0) * batch.advantages

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return for the log which tokens lost their gradient to the trust region, under the names of the clip."""
        low, high = self.outside(batch)
        return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}

    def _literal(self, row: LiteralRow, t: int, far: float) -> float:
        new = row.logps[t]
        was = row.sampler_logps[t]
        if row.advantage < 0 and new < was and far > self.threshold_low:
            return 0.0
        if row.advantage > 0 and new > was and far > self.high:
            return 0.0
        ratio = math.exp(new - was)
        if self.truncate is not None:
            ratio = min(ratio, self.truncate)
        return -ratio * row.advantage
