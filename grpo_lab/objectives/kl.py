"""KL estimators and where they act.

With x = log π_ref − log π at a token sampled from π:

=====  ============  ====================================  ===========================================
name   value         as an estimate of KL(π‖π_ref)         gradient when put *in the loss*, on-policy
=====  ============  ====================================  ===========================================
k1     −x            unbiased, can be negative             0 in expectation: does nothing
k2     x²/2          biased                                reverse KL of each next token, exactly
k3     eˣ − x − 1    unbiased, ≥ 0                         *forward* KL(π_ref‖π) of each next token
=====  ============  ====================================  ===========================================

"Of each next token": the probabilities of the prefixes are held fixed, so a token is not charged for the divergence
that it leads to later. *In the reward* (no gradient through the estimate) k1, summed over the completion, gives the
gradient of the KL of whole completions exactly; so does k1 per token, where token t pays for t and what comes after it
(the policy-gradient theorem: what lies before is no consequence of it), with less noise. ``k1_clamped`` = max(k1, 0)
never pays the policy for a token that the reference likes better; it overstates the KL, and is for the reward only.
TRL's default (``use_bias_correction_kl``: ρ·k3 with ρ not detached) has on-policy exactly the gradient of k2 in the
loss.

Sources: Schulman, "Approximating KL divergence" (2020); "Rethinking KL regularization in RLHF" (arXiv 2510.01555); per
token in the reward: InstructGPT (arXiv 2203.02155, §3.5), PPO as DeepSeekMath writes it (arXiv 2402.03300, eq. 2); the
clamp: alpaca_farm. The table is checked by exact enumeration in ``tests/reference/test_kl_gradients.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, masked_sum, safe
from grpo_lab.objectives.kl_control import AdaptiveKL

Estimator = Literal["k1", "k2", "k3", "k1_clamped"]
Placement = Literal["loss", "reward"]
ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "k1_clamped")
PLACEMENTS: tuple[str, ...] = ("loss", "reward")
PER: tuple[str, ...] = ("sequence", "token")
MAX_LOG_RATIO = 80.0
"""nats. Beyond it eˣ is not taken alone: float32 ends at e⁸⁸."""
TARGET_IN_LOSS = (
    "`kl.target` steers the β that a generation batch is charged with, and `kl.placement: loss` charges none: its KL "
    "changes with every "
    "update, and on-policy nobody has it before the update; use `kl.placement: reward`, or leave `target` out"
)


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
    """ρ·k3; where eˣ alone would overflow as e^(log ρ + x) − ρ·(x + 1), which need not."""
    x, ratio = log_reference - log_policy, log_ratio.exp()
    far = x > MAX_LOG_RATIO
    together = safe(log_ratio + x, far).exp() - ratio * (x + 1)
    return torch.where(far, together, k3(log_policy, torch.where(far, log_policy, log_reference)) * ratio)


_ESTIMATES = {"k1": k1, "k2": k2, "k3": k3, "k1_clamped": k1_clamped}


@dataclass(frozen=True)
class KLTerm:
    """β·KL as one of three estimators, in the loss or in the reward.

    Args:
        coefficient: β ≥ 0; with ``control`` the one to start from.
        estimator: ``k1``, ``k2`` or ``k3``; in the reward also ``k1_clamped``.
        placement: ``"loss"`` adds β·k per token to the loss; ``"reward"`` takes β·k from the reward (no gradient
            through it).
        ratio_weighted: in the loss only: multiply by the importance ratio, not detached (TRL's
            ``use_bias_correction_kl``; DeepSeek-V3.2, arXiv 2512.02556, eq. 7).
        per: in the reward only. ``"sequence"``: β·Σ_t k is subtracted from the completion's reward, before the
            advantage is taken. ``"token"``: −β·Σ_{s ≥ t} γ^{s−t} k_s is added to the advantage of token t, after the
            rule (``advantages.reward_to_go``).
        gamma: discount of ``per="token"``, in [0, 1].
        control: in the reward only: steers β to a target KL (``kl_control``).
    """

    coefficient: float
    estimator: str = "k3"
    placement: str = "loss"
    ratio_weighted: bool = False
    per: str = "sequence"
    gamma: float = 1.0
    control: AdaptiveKL | None = None

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"`kl.estimator` is {self.estimator!r}; it must be one of {ESTIMATORS}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"`kl.placement` is {self.placement!r}; it must be one of {PLACEMENTS}")
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"`kl.coefficient` (β) is {self.coefficient}; it must be a finite number ≥ 0")
        if self.placement == "reward" and self.ratio_weighted:
            raise ValueError("`kl.ratio_weighted` has no effect with `kl.placement: reward`; leave it out")
        if self.placement == "loss" and self.estimator == "k1_clamped":
            raise ValueError("`kl.estimator: k1_clamped` is for `kl.placement: reward`; in the loss use k2 or k3")
        if self.per not in PER:
            raise ValueError(f"`kl.per` is {self.per!r}; it must be one of {PER}")
        if self.per == "token" and self.placement == "loss":
            raise ValueError(
                "`kl.per` has no effect with `kl.placement: loss`, where every token pays anyway; leave it out"
            )
        if not (math.isfinite(self.gamma) and 0 <= self.gamma <= 1):
            raise ValueError(f"`kl.gamma` is {self.gamma}; a discount lies in [0, 1]")
        if self.gamma != 1.0 and self.per == "sequence":
            raise ValueError("`kl.gamma` has an effect only with `kl.per: token`; leave it out")
        if self.control is not None and self.placement == "loss":
            raise ValueError(TARGET_IN_LOSS)

    def in_loss(self, batch: TokenBatch) -> Tensor:
        """Per-token estimate ``[B, T]`` in nats, with its gradient; to be multiplied by ``coefficient``."""
        log_policy, log_reference = self._log_probs(batch.logps, batch.ref_logps, batch.mask)
        if self.ratio_weighted and self.estimator == "k3":
            return _weighted_k3(batch.log_ratio, log_policy, log_reference)
        estimate = _ESTIMATES[self.estimator](log_policy, log_reference)
        return estimate * batch.ratio if self.ratio_weighted else estimate

    def in_reward(self, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """Σ_t of the estimate over each completion, nats, ``[B]``, no gradient; to be multiplied by ``coefficient``."""
        return masked_sum(self.of_tokens(old_logps, ref_logps, mask), mask, dim=-1)

    def of_tokens(self, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """The estimate at each token, nats, ``[B, T]``, 0 where ``mask`` is False, no gradient."""
        log_policy, log_reference = self._log_probs(old_logps.detach(), ref_logps, mask)
        return safe(_ESTIMATES[self.estimator](log_policy, log_reference), mask)

    @staticmethod
    def _log_probs(log_policy: Tensor, log_reference: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        if log_reference is None:
            raise ValueError("a KL term needs reference log-probs, but the batch has none: set `beta` > 0 (or `kl`)")
        return safe(log_policy, mask), safe(log_reference, mask)
