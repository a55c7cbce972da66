"""prime-rl's loss: DPPO's trust region, and a square of the log-ratio that pulls every token back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.literal import LiteralRow
from grpo_lab.objectives.trust_region.dppo import TotalVariationRegion


@dataclass(frozen=True)
class PrimeRL(TotalVariationRegion):
    """prime-rl's default loss, DPPO with total variation plus a penalty: loss_t = −M_t · ρ_t · Â + τ · (log ρ_t)², ρ_t
    = π(y_t)/μ(y_t), with M_t as in ``TotalVariationRegion``.

    Source: ``default_loss_fn`` of prime-rl (commit 559b4477, August 2026), which names DPPO (arXiv 2602.04879) and the
    squared log-ratio of Kimi K2.5 (arXiv 2602.02276). Its ``adv_tau``, a factor of Â that is 1 by default, is left out.
    Its documentation writes min(ρ, δ); its code has no such bound.

    The penalty acts on every token, also where M_t or Â is 0, so no row may be left out.

    Args:
        threshold_low: ``dppo_mask_low``, a difference of probabilities.
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
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        return super().literal(row, t) + self.kl_tau * (row.logps[t] - row.sampler_logps[t]) ** 2
