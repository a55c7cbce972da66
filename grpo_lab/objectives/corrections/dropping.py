"""Corrections by which a token or a completion drops out: its weight is 0. ρ_t is π_proximal/π_sampler at token t."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.batch import masked_row_mean, safe
from grpo_lab.objectives.corrections.weight_bounds import Level, WeightBounds, check_high


@dataclass(frozen=True)
class TokenMask(WeightBounds):
    """Drop tokens whose ratio is out of bounds: w_t = ρ_t if low ≤ ρ_t ≤ high, else 0.

    Source: MIS (Liu, Li et al. 2025, "When speed kills stability", by TRL's index of papers); bounds as TRL 1.16's
    ``vllm_importance_sampling_mode: token_mask``.
    """

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        low, high = self.ends
        ratio = self.ratio(x, mask)
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)

    def literal(self, steps: list[float], t: int) -> float:
        low, high = self.ends
        ratio = self.literal_ratio(steps, t)
        if low <= ratio <= high:
            return ratio
        return 0.0


@dataclass(frozen=True)
class SequenceMask(TokenMask):
    """Drop completions whose ratio is out of bounds: w = Π_t ρ_t if low ≤ Π_t ρ_t ≤ high, else 0. TRL's default.
    Source: as ``TokenMask``."""

    level: ClassVar[Level] = "sequence"


@dataclass(frozen=True)
class IcePop(TokenMask):
    """Drop tokens whose ratio is out of bounds on either side: w_t = ρ_t if α ≤ ρ_t ≤ β, else 0. α is ``low``, β is
    ``high``.

    Source: Ring-1T (arXiv 2510.18855), the double-sided mask M(k) of IcePop's objective. The weight multiplies the
    clipped loss, not the KL. [0.5, 5] are the authors' numbers. It is ``token_mask`` with other default bounds.
    """

    low: float | None = 0.5
    high: float | None = 5.0


@dataclass(frozen=True)
class GeometricRejection:
    """Drop completions by the geometric mean of their ratios: w = 1 if low ≤ (Π_t ρ_t)^{1/|y|} ≤ high, else 0. The
    bound is the same for every length.

    Source: verl's rollout correction, "Geo-RS" (``decoupled_geo_rs``: 0.999 to 1.001), and SkyRL's
    ``sequence_mask_metric: geometric``. Our bounds are on π_proximal/π_sampler, as in verl's text and in SkyRL. verl's
    code bounds the inverse: its bounds ``l_u`` are our ``low`` 1/u and ``high`` 1/l.
    """

    low: float = 0.999
    high: float = 1.001
    level: ClassVar[Level] = "sequence"

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(
                f"`correction.low` is {self.low} and `correction.high` is {self.high}: they bound a ratio, so "
                "0 < low < high"
            )

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        mean = masked_row_mean(x, mask).unsqueeze(-1)
        return ((mean >= math.log(self.low)) & (mean <= math.log(self.high))).to(x.dtype)

    def literal(self, steps: list[float], t: int) -> float:
        return float(self.low <= math.prod(map(math.exp, steps)) ** (1 / len(steps)) <= self.high)


@dataclass(frozen=True)
class K3Rejection:
    """Drop completions whose policies differ too much: w = 1 if 1/|y| Σ_t (ρ_t − 1 − log ρ_t) ≤ high, else 0.

    The mean is an estimate of KL(π_sampler‖π_proximal) in nats per token. No token's part is negative, so tokens cannot
    offset each other as in ``GeometricRejection``. Source: verl's rollout correction, ``seq_mean_k3``
    (``bypass_ppo_clip_k3_rs``: 0.01).
    """

    high: float = 0.01
    level: ClassVar[Level] = "sequence"

    def __post_init__(self) -> None:
        check_high(self.high)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        k3 = safe(x.expm1() - x, mask)
        return (masked_row_mean(k3, mask).unsqueeze(-1) <= self.high).to(x.dtype)

    def literal(self, steps: list[float], t: int) -> float:
        return float(sum(math.exp(x) - 1 - x for x in steps) / len(steps) <= self.high)
