"""Corrections of the sampler: weights of the loss where another policy than the proximal one sampled the tokens.

With x_t = log π_proximal(y_t) − log π_sampler(y_t) and ρ_t = e^{x_t}; 0 and 1 for a token that nobody sampled or that
the engine reported no log-prob for. No gradient flows through a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from grpo_lab import registry
from grpo_lab.batch import masked_row_mean, masked_sum, safe
from grpo_lab.objectives.objective import Gather

Correction = Callable[..., Tensor]
"""``correction(x [B, T], mask [B, T]) -> weights``, ``[B, T]`` or ``[B, 1]``; of each row alone, whatever its padding.

What else a correction may say of itself, and what holds where it does not:
``whole_batch`` (False): the weights depend on all rows of the generation batch. Then it is called as
``correction(x, mask, gather)`` on this rank's rows, once a batch; ``gather(values)`` returns those of all ranks.
``level`` (none): ``token`` or ``sequence``; one of tokens is refused beside an objective of whole responses.
``keeps(weights)`` (weights != 0): which weights are within the bounds, for the log.
``literal(steps, t)``: the formula over single floats (the x of one response), for the start-up proof."""
Level = Literal["token", "sequence"]
RESERVED = ("name",)
"""Keys of ``correction: {…}`` that cannot be knobs."""


def sampler_log_ratio(proximal_logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> Tensor:
    """Return x_t, ``[B, T]``, no gradient; 0 where masked, or where the sampler's log-prob is NaN."""
    return safe(proximal_logps.detach() - sampler_logps, mask).nan_to_num(nan=0.0)


def check_high(high: float | None) -> None:
    """Raise ValueError for an upper bound that no weight or estimate can be below."""
    if high is not None and not high > 0:
        raise ValueError(f"`correction.high` is {high}; it must be a number > 0")


@dataclass(frozen=True)
class _Bounds:
    """``low`` and ``high`` bound the ratio; ``None``: no bound on that side."""

    low: float | None = None
    high: float | None = 3.0
    level: ClassVar[Level] = "token"

    def __post_init__(self) -> None:
        check_high(self.high)
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"`correction.low` is {self.low} and `correction.high` is {self.high}: low must be below")

    @property
    def ends(self) -> tuple[float, float]:
        low = -math.inf
        high = math.inf
        if self.low is not None:
            low = self.low
        if self.high is not None:
            high = self.high
        return low, high

    def ratio(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return ρ_t ``[B, T]``, or Π_t ρ_t ``[B, 1]``."""
        if self.level == "sequence":
            x = masked_sum(x, mask, dim=-1).unsqueeze(-1)
        return x.exp()

    def literal_ratio(self, steps: list[float], t: int) -> float:
        if self.level == "sequence":
            return math.exp(sum(steps))
        return math.exp(steps[t])


@dataclass(frozen=True)
class TokenTruncate(_Bounds):
    """w_t = min(max(ρ_t, low), high).

    Source: TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"); bounds as
    TRL 1.16's ``vllm_importance_sampling_mode: token_truncate``.
    """

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        low, high = self.ends
        return self.ratio(x, mask).clamp(min=low, max=high)

    def keeps(self, weights: Tensor) -> Tensor:
        low, high = self.ends
        return (weights > low) & (weights < high)

    def literal(self, steps: list[float], t: int) -> float:
        low, high = self.ends
        return min(max(self.literal_ratio(steps, t), low), high)


@dataclass(frozen=True)
class SequenceTruncate(TokenTruncate):
    """w = min(max(Π_t ρ_t, low), high) of the whole completion. Source: as ``TokenTruncate``."""

    level: ClassVar[Level] = "sequence"


@dataclass(frozen=True)
class TokenMask(_Bounds):
    """w_t = ρ_t if low ≤ ρ_t ≤ high, else 0: the token drops out.

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
    """w = Π_t ρ_t if low ≤ w ≤ high, else 0: the completion drops out. TRL's default. Source: as ``TokenMask``."""

    level: ClassVar[Level] = "sequence"


@dataclass(frozen=True)
class TIS(TokenTruncate):
    """w_t = min(ρ_t, high), high = 2 as in verl. Source: as ``TokenTruncate``; verl's ``rollout_is: token``."""

    high: float | None = 2.0


@dataclass(frozen=True)
class IcePop(TokenMask):
    """w_t = ρ_t if α ≤ ρ_t ≤ β, else 0. α is ``low``, β is ``high``.

    Source: Ring-1T (arXiv 2510.18855), the double-sided mask M(k) of IcePop's objective; the weight multiplies the
    clipped loss, not the KL. [0.5, 5] are the authors' numbers. We differ in nothing: ``token_mask`` with two bounds.
    """

    low: float | None = 0.5
    high: float | None = 5.0


@dataclass(frozen=True)
class GeometricRejection:
    """w = 1 if low ≤ (Π_t ρ_t)^{1/|y|} ≤ high, else 0: the completion drops out, whatever its length.

    Source: verl's rollout correction, "Geo-RS" (``decoupled_geo_rs``: 0.999 to 1.001), and SkyRL's
    ``sequence_mask_metric: geometric``. Our bounds are on π_proximal/π_sampler, as in verl's text and in SkyRL. verl's
    code bounds the inverse: its ``l_u`` is our low 1/u and high 1/l.
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
    """w = 1 if 1/|y| Σ_t (ρ_t − 1 − x_t) ≤ high, else 0: the completion drops out.

    The mean is an estimate of KL(π_sampler‖π_proximal) that is never negative, so tokens cannot offset each other as in
    ``GeometricRejection``. Source: verl's rollout correction, ``seq_mean_k3`` (``bypass_ppo_clip_k3_rs``: 0.01).
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


@dataclass(frozen=True)
class BatchNormalised:
    """w = min(ρ, high) / mean of min(ρ, high) over the generation batch of all ranks: the mean weight is 1.

    ``per: token``: ρ_t, averaged over loss tokens. ``sequence``: Π_t ρ_t, averaged over completions. A mean of 0
    (up to 1e-8) divides nothing. Source: verl's rollout correction, ``rollout_is_batch_normalize``.
    """

    per: Level = "token"
    high: float = 2.0
    whole_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_high(self.high)
        if self.per not in ("token", "sequence"):
            raise ValueError(f"`correction.per` is {self.per!r}; it must be 'token' or 'sequence'")

    @property
    def level(self) -> Level:
        return self.per

    @property
    def bounded(self) -> TokenTruncate:
        """The weights before they are divided by their mean."""
        if self.per == "sequence":
            return SequenceTruncate(high=self.high)
        return TokenTruncate(high=self.high)

    def __call__(self, x: Tensor, mask: Tensor, gather: Gather) -> Tensor:
        weights = self.bounded(x, mask)
        counted = mask
        if self.per == "sequence":
            counted = mask.any(dim=1, keepdim=True)
        own = torch.stack([masked_sum(weights, counted), counted.sum().to(weights.dtype)])
        total, count = gather(own).view(-1, 2).sum(0)
        mean = total / count.clamp(min=1)
        return weights / torch.where(mean > 1e-8, mean, 1.0)

    def literal(self, rows: list[list[float]], row: int, t: int) -> float:
        """Of the rows of all ranks, unlike other corrections' formulas."""
        weights = []
        for steps in rows:
            of_row = [self.bounded.literal(steps, place) for place in range(len(steps))]
            if self.per == "sequence":
                of_row = of_row[:1]  # one weight a completion
            weights += of_row
        return self.bounded.literal(rows[row], t) * len(weights) / sum(weights)


CORRECTIONS: dict[str, Any] = {
    "token_truncate": TokenTruncate,
    "token_mask": TokenMask,
    "sequence_truncate": SequenceTruncate,
    "sequence_mask": SequenceMask,
    "tis": TIS,
    "icepop": IcePop,
    "geometric_rejection": GeometricRejection,
    "k3_rejection": K3Rejection,
    "batch_normalised": BatchNormalised,
}
#: class → TRL's ``vllm_importance_sampling_mode`` that computes the same with the same bounds
TRLS_MODES: dict[type, str] = {
    TokenTruncate: "token_truncate",
    TokenMask: "token_mask",
    SequenceTruncate: "sequence_truncate",
    SequenceMask: "sequence_mask",
    TIS: "token_truncate",
    IcePop: "token_mask",
}


def kept(correction: Correction, weights: Tensor) -> Tensor:
    """Return bool, like ``weights``: which are within the correction's bounds."""
    keeps: Callable[[Tensor], Tensor] | None = getattr(correction, "keeps", None)
    if keeps is None:
        return weights != 0
    return keeps(weights)


def register_correction(name: str, part: Any = None) -> Any:
    """Register ``part`` under ``name``, so that ``correction: name`` selects it. Also usable as a decorator.

    ``part`` is a function, or a dataclass whose fields are its knobs. Raises ValueError if another object has the name
    already, or the part cannot be called.
    """
    if part is None:
        return lambda later: register_correction(name, later)
    return registry.add(CORRECTIONS, name, part, RESERVED, "correction")
