"""Trust regions around the sampler: a token whose probability has moved too far from the one with which it was sampled
moves no further.

The ratio here is ρ = π/μ, where μ is the policy that sampled the token (``TokenBatch.sampler_logps``): its log-probs
are the engine's own, or the proximal policy's where there is no engine. So the ratio covers both how an engine's
log-probs differ from the trainer's and how far the policy has moved since. A sampler correction is not multiplied on
top, and the level of ``batch.log_ratio`` has no effect.
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
    """Loss of a trust region: loss_t = −ρ_t · Â, or 0 for a token that is outside the region and that Â pushes further
    outwards. A subclass says with ``_far`` how far a token has moved.

    Args:
        threshold_low: distance above which a token with Â < 0 that has become less likely is cut off.
        threshold_high: distance above which a token with Â > 0 that has become more likely is cut off; ``None`` means
            equal to ``threshold_low``.
        truncate: largest weight ρ of a token, ≥ 1; ``None`` for no bound. A truncated token keeps its gradient.
    """

    threshold_low: float
    threshold_high: float | None = None
    truncate: float | None = None

    #: its ratio is against the sampler, so the sampler correction is in it already
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
        """Return how far each token has moved from ``sampled`` to ``logps``, ``[B, T]`` ≥ 0, in the unit of the
        thresholds."""
        raise NotImplementedError

    def outside(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the tokens that are cut off, bool ``[B, T]`` each: first those that are too unlikely and have Â < 0,
        then those that are too likely and have Â > 0."""
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
        """Return the loss of token ``t``, which has moved by ``far``, in plain floats."""
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
