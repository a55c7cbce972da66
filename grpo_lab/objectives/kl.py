"""KL estimators and where they act.

With x = log π_ref − log π at a token sampled from π:

=====  ============  ====================================  ===========================================
name   value         as an estimate of KL(π‖π_ref)         gradient when put *in the loss*, on-policy
=====  ============  ====================================  ===========================================
k1     −x            unbiased, can be negative             0 in expectation: does nothing
k2     x²/2          biased                                reverse KL of each next token, exactly
k3     eˣ − x − 1    unbiased, ≥ 0                         *forward* KL(π_ref‖π) of each next token
=====  ============  ====================================  ===========================================

"Of each next token": the probabilities of the prefixes are held fixed, so a token is not charged for the divergence that
it leads to later. *In the reward* (no gradient through the estimate) k1, summed over the completion, gives the gradient of
the KL of whole completions exactly. TRL's default (``use_bias_correction_kl``: ρ·k3 with ρ not detached) has on-policy
exactly the gradient of k2 in the loss.

Sources: Schulman, "Approximating KL divergence" (2020); "Rethinking KL regularization in RLHF" (arXiv 2510.01555).
The table is checked by exact enumeration in ``tests/reference/test_kl_gradients.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.masked import masked_sum, safe

Estimator = Literal["k1", "k2", "k3"]
Placement = Literal["loss", "reward"]
ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3")
PLACEMENTS: tuple[str, ...] = ("loss", "reward")


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


_ESTIMATES = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class KLTerm:
    """β·KL as one of three estimators, in the loss or in the reward.

    Args:
        coefficient: β ≥ 0.
        estimator: ``k1``, ``k2`` or ``k3``.
        placement: ``"loss"`` adds β·k per token to the loss; ``"reward"`` subtracts β·Σ_t k from the completion's reward
            before the advantage is taken (no gradient through it).
        ratio_weighted: in the loss only: multiply by the importance ratio, not detached (TRL's
            ``use_bias_correction_kl``; DeepSeek-V3.2, arXiv 2512.02556, eq. 7).
    """

    coefficient: float
    estimator: str = "k3"
    placement: str = "loss"
    ratio_weighted: bool = False

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"`kl.estimator` is {self.estimator!r}; it must be one of {ESTIMATORS}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"`kl.placement` is {self.placement!r}; it must be one of {PLACEMENTS}")
        if not self.coefficient >= 0:
            raise ValueError(f"`kl.coefficient` (β) is {self.coefficient}; it must be ≥ 0")
        if self.placement == "reward" and self.ratio_weighted:
            raise ValueError("`kl.ratio_weighted` has no effect with `kl.placement: reward`; leave it out")

    def in_loss(self, batch: TokenBatch) -> Tensor:
        """Per-token estimate ``[B, T]`` in nats, with its gradient; to be multiplied by ``coefficient``."""
        log_policy, log_reference = self._log_probs(batch.logps, batch.ref_logps, batch.mask)
        estimate = _ESTIMATES[self.estimator](log_policy, log_reference)
        return estimate * batch.ratio if self.ratio_weighted else estimate

    def in_reward(self, old_logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
        """Σ_t of the estimate over each completion, nats, ``[B]``, no gradient; to be multiplied by ``coefficient``."""
        log_policy, log_reference = self._log_probs(old_logps.detach(), ref_logps, mask)
        return masked_sum(_ESTIMATES[self.estimator](log_policy, log_reference), mask, dim=-1)

    @staticmethod
    def _log_probs(log_policy: Tensor, log_reference: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        if log_reference is None:
            raise ValueError("a KL term needs reference log-probs, but the batch has none: set `beta` > 0 (or `kl`)")
        return safe(log_policy, mask), safe(log_reference, mask)
