"""The KL term of an objective: which estimator, where it acts, and with which β."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from grpo_lab.batch import TokenBatch, masked_sum, safe
from grpo_lab.objectives.adaptive_kl import AdaptiveKL
from grpo_lab.objectives.kl_estimators import ESTIMATES, weighted_k3

PLACEMENTS: tuple[str, ...] = ("loss", "reward")
PER: tuple[str, ...] = ("sequence", "token")
ESTIMATORS = tuple(ESTIMATES)


@dataclass(frozen=True)
class KLTerm:
    """A term β·KL by one of the estimators, in the loss or in the reward.

    Args:
        coefficient: β ≥ 0; with ``control`` the first β.
        estimator: ``k1``, ``k2`` or ``k3``; in the reward also ``k1_clamped``.
        placement: ``"loss"`` adds β·k of each token to its loss; ``"reward"`` subtracts it from the reward, without
            gradient.
        ratio_weighted: in the loss only: multiply k by the importance ratio, not detached (TRL's
            ``use_bias_correction_kl``; DeepSeek-V3.2, arXiv 2512.02556, eq. 7).
        per: in the reward only. ``"sequence"``: β·Σ_t k is subtracted from the completion's reward, before the
            advantage is taken. ``"token"``: −β·Σ_{s ≥ t} γ^{s−t} k_s is added to the advantage of token t, after the
            advantage rule (``advantages.reward_to_go``); s and t count the tokens that the policy wrote.
        gamma: discount γ of ``per="token"``, in [0, 1].
        control: in the reward only: moves β so that the KL follows a target; ``None`` keeps β.
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
        """Return the estimate of each token ``[B, T]`` in nats, with its gradient. The caller multiplies it by
        ``coefficient``. Raises ValueError if the batch has no reference log-probs."""
        log_policy, log_reference = self._log_probs(batch.logps, batch.ref_logps, batch.mask)
        if self.ratio_weighted and self.estimator == "k3":
            return weighted_k3(batch.log_ratio, log_policy, log_reference)
        estimate = ESTIMATES[self.estimator](log_policy, log_reference)
        if self.ratio_weighted:
            return estimate * batch.ratio
        return estimate

    def in_reward(self, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """Return the sum of the estimate over each completion's tokens, ``[B]`` in nats, without gradient. The caller
        multiplies it by ``coefficient``."""
        return masked_sum(self.of_tokens(old_logps, ref_logps, mask), mask, dim=-1)

    def of_tokens(self, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """Return the estimate of each token, ``[B, T]`` in nats, without gradient; 0 where ``mask`` is False."""
        log_policy, log_reference = self._log_probs(old_logps.detach(), ref_logps, mask)
        return safe(ESTIMATES[self.estimator](log_policy, log_reference), mask)

    @staticmethod
    def _log_probs(log_policy: Tensor, log_reference: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        if log_reference is None:
            raise ValueError("a KL term needs reference log-probs, but the batch has none: set `beta` > 0 (or `kl`)")
        return safe(log_policy, mask), safe(log_reference, mask)
