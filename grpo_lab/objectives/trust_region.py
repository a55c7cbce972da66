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

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.clipped import LiteralRow

TINY = 1e-8
"""The authors' guard where the rest of the distribution is 0."""


def total_variation(logps: Tensor, sampled: Tensor) -> Tensor:
    """|π − μ|: the total variation of "this token or another one" (arXiv 2602.04879, eq. 13)."""
    return (logps.exp() - sampled.exp()).abs()


def binary_kl(logps: Tensor, sampled: Tensor) -> Tensor:
    """μ·log(μ/π) + (1 − μ)·log((1 − μ)/(1 − π)): KL(μ‖π) of "this token or another one" (eq. 14), in nats."""
    rest = torch.log((TINY - torch.expm1(sampled)) / (TINY - torch.expm1(logps)))
    return sampled.exp() * (sampled - logps) - torch.expm1(sampled) * rest


@dataclass(frozen=True)
class _WithinRegion:
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


@dataclass(frozen=True)
class TotalVariationRegion(_WithinRegion):
    """DPPO with total variation: loss_t = −M_t · ρ_t · Â, ρ_t = π(y_t)/μ(y_t); M_t = 0 where |π − μ| > δ and Â pushes
    the token on outwards, else 1.

    A ratio says little of a rare token (10⁻⁵ to 10⁻³ is a ratio of 100) and much of a frequent one (0.99 to 0.8); a
    difference of probabilities is what both moved.

    Source: DPPO (arXiv 2602.04879 v3, eq. 12–13), ``dppo_binary_tv`` of its code. δ = 0.15 is that of section C.1 and
    of their script in verl; most runs of section E have 0.2. Their code also caps the weight ρ at 10 and keeps its
    gradient (``truncate``; the script puts the cap out of reach, section E has 5). It computes −sg(ρ)·Â·log π, which
    has the same gradient. The top-k divergences (eq. 15–16) need log-probs of tokens that were not sampled: not here.
    The authors find no significant gain in them (section F.3).

    Args:
        threshold_low: δ for Â < 0, a probability.
        threshold_high: δ for Â > 0; ``None`` means equal to ``threshold_low``.
        truncate: largest weight of a token; ``None`` for no bound.
    """

    threshold_low: float = 0.15

    def _far(self, logps: Tensor, sampled: Tensor) -> Tensor:
        return total_variation(logps, sampled)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        return self._literal(row, t, abs(math.exp(row.logps[t]) - math.exp(row.sampler_logps[t])))


@dataclass(frozen=True)
class KLRegion(_WithinRegion):
    """DPPO with KL: loss_t = −M_t · ρ_t · Â, ρ_t = π(y_t)/μ(y_t); M_t = 0 where KL(μ‖π) of "this token or another one"
    is above δ and Â pushes the token on outwards, else 1.

    Source: DPPO (arXiv 2602.04879 v3, eq. 12 and 14), ``dppo_binary_kl`` of its code; δ = 0.05 as the authors run it.
    Else as ``TotalVariationRegion``.

    Args:
        threshold_low: δ for Â < 0, nats.
        threshold_high: δ for Â > 0; ``None`` means equal to ``threshold_low``.
        truncate: largest weight of a token; ``None`` for no bound.
    """

    threshold_low: float = 0.05

    def _far(self, logps: Tensor, sampled: Tensor) -> Tensor:
        return binary_kl(logps, sampled)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        new = math.exp(row.logps[t])
        was = math.exp(row.sampler_logps[t])
        rest = (1 - was) * math.log((1 - was + TINY) / (1 - new + TINY))
        return self._literal(row, t, was * (row.sampler_logps[t] - row.logps[t]) + rest)


@dataclass(frozen=True)
class PrimeRL(TotalVariationRegion):
    """prime-rl's default loss: loss_t = −M_t · ρ_t · Â + τ · (log ρ_t)², ρ_t = π(y_t)/μ(y_t), M_t as in DPPO with total
    variation.

    Source: ``default_loss_fn`` of prime-rl (commit 559b4477, August 2026), which names DPPO (arXiv 2602.04879) and the
    squared log-ratio of Kimi K2.5 (arXiv 2602.02276). Its ``adv_tau``, a factor of Â, is left out: 1 by default. Its
    page writes min(ρ, δ), its code has no such bound.

    The second term acts on every token, masked or not, and where Â is 0: no row may be left out.

    Args:
        threshold_low: ``dppo_mask_low``, a probability.
        threshold_high: ``dppo_mask_high``; ``None`` means equal to ``threshold_low``.
        truncate: largest weight of a token; ``None`` for no bound.
        kl_tau: τ ≥ 0, per squared nat.
    """

    threshold_low: float = 0.2
    kl_tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.kl_tau < math.inf:
            raise ValueError(f"`objective.kl_tau` is {self.kl_tau}; it must be a finite number ≥ 0")

    def __call__(self, batch: TokenBatch) -> Tensor:
        return super().__call__(batch) + self.kl_tau * (batch.logps - batch.sampler_logps).square()

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        return super().literal(row, t) + self.kl_tau * (row.logps[t] - row.sampler_logps[t]) ** 2
