"""KL estimators and where they act; β as a controller.

With x = log π_ref − log π at a token sampled from π:

=====  ============  ====================================  ===========================================
name   value         as an estimate of KL(π‖π_ref)         gradient when put *in the loss*, on-policy
=====  ============  ====================================  ===========================================
k1     −x            unbiased, can be negative             0 in expectation: does nothing
k2     x²/2          biased                                reverse KL of each next token, exactly
k3     eˣ − x − 1    unbiased, ≥ 0                         *forward* KL(π_ref‖π) of each next token
=====  ============  ====================================  ===========================================

"Of each next token": the prefixes are held fixed, so a token is not charged for the divergence that it leads to later.
*In the reward* (no gradient through the estimate) k1, summed over the completion, gives the gradient of the KL of whole
completions exactly. So does k1 per token, with less noise; token t then pays for t and what comes after it.
``k1_clamped`` = max(k1, 0) is 0 at a token that the reference prefers; it overstates the KL and is for the reward only.
TRL's default (``use_bias_correction_kl``: ρ·k3 with ρ not detached) has on-policy exactly the gradient of k2.

Sources: Schulman, "Approximating KL divergence" (2020); "Rethinking KL regularization in RLHF" (arXiv 2510.01555); per
token in the reward: InstructGPT (arXiv 2203.02155, §3.5), PPO as DeepSeekMath writes it (arXiv 2402.03300, eq. 2); the
clamp: alpaca_farm. The table is checked by exact enumeration in ``tests/reference/test_kl_gradients.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, masked_sum, safe

PLACEMENTS: tuple[str, ...] = ("loss", "reward")
PER: tuple[str, ...] = ("sequence", "token")
MAX_LOG_RATIO = 80.0
"""Largest log-ratio, in nats, of which eˣ is taken by itself: float32 ends at e⁸⁸."""


def k1(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """−x = log π − log π_ref, nats per token."""
    return log_policy - log_reference


def k2(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """x²/2, nats per token."""
    return 0.5 * (log_reference - log_policy).square()


def k3(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """eˣ − x − 1, nats per token; ≥ 0."""
    x = log_reference - log_policy
    return x.exp() - x - 1


def k1_clamped(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """max(−x, 0), nats per token; ≥ 0."""
    return k1(log_policy, log_reference).clamp(min=0)


def _weighted_k3(log_ratio: Tensor, log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """Compute ρ·k3. Where eˣ alone would overflow, use e^(log ρ + x) − ρ·(x + 1), which need not overflow."""
    x = log_reference - log_policy
    ratio = log_ratio.exp()
    far = x > MAX_LOG_RATIO
    together = safe(log_ratio + x, far).exp() - ratio * (x + 1)
    return torch.where(far, together, k3(log_policy, torch.where(far, log_policy, log_reference)) * ratio)


_ESTIMATES = {"k1": k1, "k2": k2, "k3": k3, "k1_clamped": k1_clamped}
ESTIMATORS = tuple(_ESTIMATES)


#: The error is clipped to ± this share of the target (Ziegler et al.; TRL's old PPO).
LARGEST_ERROR = 0.2
RATE = 0.1


@dataclass(frozen=True)
class AdaptiveKL:
    """A controller of β: β_{t+1} = β_t · (1 + K·e_t),  e_t = clip((KL_t − target)/target, −0.2, 0.2). β grows if the KL
    is too large.

    Source: Ziegler et al. (arXiv 1909.08593, section 2.2), K = 0.1: β changes by at most 2% a generation batch. TRL's
    old PPO (up to 0.11) and verl have K = n/horizon with n completions a generation batch. Then the same number of
    completions has the same effect, however they are cut into batches.

    Args:
        target: the KL to hold, in nats per completion: the mean over completions of Σ_t (log π − log π_ref) of own
            tokens.
        rate: K; ``None``: 0.1, or n/``horizon`` if that is given.
        horizon: completions over which β follows an error of 1; ``None``: K is ``rate``.
    """

    target: float
    rate: float | None = None
    horizon: float | None = None

    def __post_init__(self) -> None:
        for name in ("target", "rate", "horizon"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"`kl.{name}` is {value}; it must be a number > 0")
        if self.rate is not None and self.horizon is not None:
            raise ValueError("`kl.rate` and `kl.horizon` are two names for how fast β follows; set one")
        if self.rate is not None and self.rate * LARGEST_ERROR >= 1:
            most = f"{1 / LARGEST_ERROR:g}"
            raise ValueError(f"`kl.rate` is {self.rate}; it must be < {most}, or β could become 0 or less")

    def rate_of(self, completions: int) -> float:
        """Return K for a generation batch of so many completions. Raises ValueError if one batch could take β to 0 or
        below."""
        if self.horizon is None:
            if self.rate is None:
                return RATE
            return self.rate
        rate = completions / self.horizon
        if rate * LARGEST_ERROR >= 1:
            raise ValueError(
                f"`kl.horizon` is {self.horizon:g} and a generation batch has {completions} completions: β could "
                f"become 0 or less; set a horizon > {completions * LARGEST_ERROR:g}"
            )
        return rate

    def following(self, coefficient: float, measured: float, completions: int) -> float:
        """Return β for the next generation batch. Raises ValueError if the KL is not finite.

        Args:
            coefficient: β that this batch was charged with.
            measured: its KL in nats per completion; may be negative, being an estimate.
            completions: its completions, over all ranks.
        """
        if not math.isfinite(measured):
            raise ValueError(f"the measured KL is {measured}; `kl.target` cannot follow it")
        error = min(max(measured / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return coefficient * (1 + self.rate_of(completions) * error)


@dataclass(frozen=True)
class KLTerm:
    """A term β·KL by one of the estimators, in the loss or in the reward.

    Args:
        coefficient: β ≥ 0; with ``control`` the first β.
        estimator: ``k1``, ``k2`` or ``k3``; in the reward also ``k1_clamped``.
        placement: ``"loss"`` adds β·k per token to the loss; ``"reward"`` subtracts it from the reward, without
            gradient.
        ratio_weighted: in the loss only: multiply by the importance ratio, not detached (TRL's
            ``use_bias_correction_kl``; DeepSeek-V3.2, arXiv 2512.02556, eq. 7).
        per: in the reward only. ``"sequence"``: β·Σ_t k is subtracted from the completion's reward, before the
            advantage is taken. ``"token"``: −β·Σ_{s ≥ t} γ^{s−t} k_s is added to the advantage of token t, after the
            rule (``advantages.reward_to_go``).
        gamma: discount of ``per="token"``, in [0, 1].
        control: in the reward only: steers β to a target KL.
    """

    coefficient: float
    estimator: str = "k3"
    placement: str = "loss"
    ratio_weighted: bool = False
    per: str = "sequence"
    gamma: float = 1.0
    control: AdaptiveKL | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("estimator", ESTIMATORS), ("placement", PLACEMENTS), ("per", PER)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`kl.{name}` is {getattr(self, name)!r}; it must be one of {allowed}")
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"`kl.coefficient` (β) is {self.coefficient}; it must be a finite number ≥ 0")
        if self.placement == "reward" and self.ratio_weighted:
            raise ValueError("`kl.ratio_weighted` has no effect with `kl.placement: reward`; leave it out")
        if self.placement == "loss" and self.estimator == "k1_clamped":
            raise ValueError("`kl.estimator: k1_clamped` is for `kl.placement: reward`; in the loss use k2 or k3")
        if self.per == "token" and self.placement == "loss":
            raise ValueError("`kl.per` has no effect with `kl.placement: loss`: there every token pays; leave it out")
        if not (math.isfinite(self.gamma) and 0 <= self.gamma <= 1):
            raise ValueError(f"`kl.gamma` is {self.gamma}; a discount lies in [0, 1]")
        if self.gamma != 1.0 and self.per == "sequence":
            raise ValueError("`kl.gamma` has an effect only with `kl.per: token`; leave it out")
        if self.control is not None and self.placement == "loss":
            raise ValueError(
                "`kl.target` steers the β that a generation batch is charged with, and `kl.placement: loss` charges "
                "none: its KL changes with every update, and on-policy nobody has it before the update; use "
                "`kl.placement: reward`, or leave `target` out"
            )

    def in_loss(self, batch: TokenBatch) -> Tensor:
        """Return the per-token estimate ``[B, T]`` in nats, with its gradient. The caller multiplies it by
        ``coefficient``."""
        log_policy, log_reference = self._log_probs(batch.logps, batch.ref_logps, batch.mask)
        if self.ratio_weighted and self.estimator == "k3":
            return _weighted_k3(batch.log_ratio, log_policy, log_reference)
        estimate = _ESTIMATES[self.estimator](log_policy, log_reference)
        if self.ratio_weighted:
            return estimate * batch.ratio
        return estimate

    def in_reward(self, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """Return Σ_t of the estimate over each completion, ``[B]`` in nats, without gradient. The caller multiplies it
        by ``coefficient``."""
        return masked_sum(self.of_tokens(old_logps, ref_logps, mask), mask, dim=-1)

    def of_tokens(self, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """Return the estimate at each token, ``[B, T]`` in nats, 0 where ``mask`` is False, without gradient."""
        log_policy, log_reference = self._log_probs(old_logps.detach(), ref_logps, mask)
        return safe(_ESTIMATES[self.estimator](log_policy, log_reference), mask)

    @staticmethod
    def _log_probs(log_policy: Tensor, log_reference: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        if log_reference is None:
            raise ValueError("a KL term needs reference log-probs, but the batch has none: set `beta` > 0 (or `kl`)")
        return safe(log_policy, mask), safe(log_reference, mask)
