"""KL estimators, and what each does in the loss and in the reward.

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

import torch
from torch import Tensor

from grpo_lab.batch import safe

MAX_LOG_RATIO = 80.0
"""Largest x, in nats, for which eˣ is computed by itself: float32 ends at e⁸⁸."""


def k1(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """Return k1 = −x = log π − log π_ref, nats per token."""
    return log_policy - log_reference


def k2(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """Return k2 = x²/2, nats per token."""
    return 0.5 * (log_reference - log_policy).square()


def k3(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """Return k3 = eˣ − x − 1, nats per token; never negative."""
    x = log_reference - log_policy
    return x.exp() - x - 1


def k1_clamped(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """Return max(k1, 0) = max(−x, 0), nats per token."""
    return k1(log_policy, log_reference).clamp(min=0)


def weighted_k3(log_ratio: Tensor, log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """Return ρ·k3, with a gradient through ρ. Where eˣ alone would overflow, it is computed as e^(log ρ + x) − ρ·(x +
    1), since ρ may be small enough to make up for it."""
    x = log_reference - log_policy
    ratio = log_ratio.exp()
    far = x > MAX_LOG_RATIO
    together = safe(log_ratio + x, far).exp() - ratio * (x + 1)
    return torch.where(far, together, k3(log_policy, torch.where(far, log_policy, log_reference)) * ratio)


ESTIMATES = {"k1": k1, "k2": k2, "k3": k3, "k1_clamped": k1_clamped}
