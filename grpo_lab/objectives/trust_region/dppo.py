"""DPPO's two trust regions around the sampler: by total variation, and by KL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.objectives.literal import LiteralRow
from grpo_lab.objectives.trust_region import WithinRegion

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
class TotalVariationRegion(WithinRegion):
    """DPPO with total variation: loss_t = −M_t · ρ_t · Â, ρ_t = π(y_t)/μ(y_t); M_t = 0 where |π − μ| > δ and Â pushes
    the token on outwards, else 1.

    A ratio says little of a rare token (10⁻⁵ to 10⁻³ is a ratio of 100) and much of a frequent one (0.99 to 0.8); a
    difference of probabilities is what both moved.

    Source: DPPO (arXiv 2602.04879 v3, eq. 12–13), ``dppo_binary_tv`` of its code. δ = 0.15 is that of section C.1 and
    of their script in verl; most runs of section E have 0.2. Their code also caps the weight ρ at 10 and keeps its
    gradient (``truncate``; the script puts the cap out of reach, section E has 5). It computes −sg(ρ)·Â·log π, which
    has the same gradient. The top-k divergences (eq. 15–16) need log-probs of tokens that were not sampled: not here.
    The authors find no significant gain in them (section F.3). Advantages without σ and sums over a fixed length are
    those of their script (Dr. GRPO's).

    Args:
        threshold_low: δ for Â < 0, a probability.
        threshold_high: δ for Â > 0; ``None`` means equal to ``threshold_low``.
        truncate: largest weight of a token; ``None`` for no bound.
    """

    threshold_low: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold_low", "threshold_high"):
            if (getattr(self, name) or 0) >= 1:
                seen = f"`objective.{name}` is {getattr(self, name)}"
                raise ValueError(f"{seen}; it must be below 1, which no difference of probabilities is above")

    def _far(self, logps: Tensor, sampled: Tensor) -> Tensor:
        return total_variation(logps, sampled)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        return self._literal(row, t, abs(math.exp(row.logps[t]) - math.exp(row.sampler_logps[t])))


@dataclass(frozen=True)
class KLRegion(WithinRegion):
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
