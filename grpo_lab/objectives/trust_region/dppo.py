"""DPPO's two trust regions around the sampler: by total variation, and by KL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.objectives.literal import LiteralRow
from grpo_lab.objectives.trust_region import WithinRegion

TINY = 1e-8
"""Number that keeps the logarithm finite where the rest of a distribution is 0; the authors'."""


def total_variation(logps: Tensor, sampled: Tensor) -> Tensor:
    """Return |π − μ| of each token: the total variation of the two-way choice "this token or another one" (arXiv
    2602.04879, eq. 13)."""
    return (logps.exp() - sampled.exp()).abs()


def binary_kl(logps: Tensor, sampled: Tensor) -> Tensor:
    """Return KL(μ‖π) of the two-way choice "this token or another one", in nats per token: μ·log(μ/π) + (1 − μ)·log((1
    − μ)/(1 − π)) (arXiv 2602.04879, eq. 14)."""
    rest = torch.log((TINY - torch.expm1(sampled)) / (TINY - torch.expm1(logps)))
    return sampled.exp() * (sampled - logps) - torch.expm1(sampled) * rest


@dataclass(frozen=True)
class TotalVariationRegion(WithinRegion):
    """DPPO with total variation: loss_t = −M_t · ρ_t · Â, ρ_t = π(y_t)/μ(y_t). M_t = 0 where |π − μ| > δ and Â pushes
    the token further outwards, else 1.

    A ratio overstates the change of a rare token (from 10⁻⁵ to 10⁻³ is a ratio of 100) and understates that of a
    frequent one (from 0.99 to 0.8 is a ratio of 0.81). The difference of probabilities is the probability that has
    moved.

    Source: DPPO (arXiv 2602.04879 v3, eq. 12–13), ``dppo_binary_tv`` of its code. δ = 0.15 is that of section C.1 and
    of their script in verl; most runs of section E have 0.2. Their code also caps the weight ρ at 10 and keeps its
    gradient (``truncate``; the script puts the cap out of reach, section E has 5). It computes −sg(ρ)·Â·log π, which
    has the same gradient. Advantages without σ and sums over a fixed length are those of their script (Dr. GRPO's).

    How we differ: the top-k divergences (eq. 15–16) are left out, since they need log-probs of tokens that were not
    sampled. The authors find no significant gain in them (section F.3).

    Args:
        threshold_low: δ for Â < 0, a difference of probabilities, below 1.
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
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        return self._literal(row, t, abs(math.exp(row.logps[t]) - math.exp(row.sampler_logps[t])))


@dataclass(frozen=True)
class KLRegion(WithinRegion):
    """DPPO with KL: loss_t = −M_t · ρ_t · Â, ρ_t = π(y_t)/μ(y_t). M_t = 0 where KL(μ‖π) of "this token or another one"
    is above δ and Â pushes the token further outwards, else 1.

    Source: DPPO (arXiv 2602.04879 v3, eq. 12 and 14), ``dppo_binary_kl`` of its code; δ = 0.05 as the authors run it.
    Otherwise as ``TotalVariationRegion``.

    Args:
        threshold_low: δ for Â < 0, nats.
        threshold_high: δ for Â > 0; ``None`` means equal to ``threshold_low``.
        truncate: largest weight of a token; ``None`` for no bound.
    """

    threshold_low: float = 0.05

    def _far(self, logps: Tensor, sampled: Tensor) -> Tensor:
        return binary_kl(logps, sampled)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        new = math.exp(row.logps[t])
        was = math.exp(row.sampler_logps[t])
        rest = (1 - was) * math.log((1 - was + TINY) / (1 - new + TINY))
        return self._literal(row, t, was * (row.sampler_logps[t] - row.logps[t]) + rest)
