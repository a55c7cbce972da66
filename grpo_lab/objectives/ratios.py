"""Importance ratios of the policy against its older self.

Each function takes log-probs in nats, ``[B, T]``: ``logps`` of the policy in training, with gradient, and ``old_logps``
of the proximal policy. It returns the *logarithm* of the ratio; exponentials are taken as late as possible. The ratio
of the proximal policy to the one that sampled is in ``corrections``.
"""

from __future__ import annotations

from torch import Tensor

from grpo_lab.batch import masked_row_mean, masked_sum, safe

RATIO_LEVELS: tuple[str, ...] = ("token", "sequence", "sequence_token", "product")
MAX_LOG_PRODUCT = 40.0
"""Largest log, in nats, of the plain product of a response's ratios. Even the square of e⁴⁰ is a float32 number (they
end at e⁸⁸)."""


def token_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return log ρ_t = log π_θ(y_t) − log π_old(y_t) of each token, ``[B, T]``; 0 where masked. GRPO (arXiv 2402.03300,
    eq. 3)."""
    return safe(logps - old_logps, mask)


def sequence_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return log s = 1/|y| Σ_t log ρ_t of each row, ``[B, 1]``: GSPO's ratio, normalised by length (arXiv 2507.18071,
    eq. 7)."""
    return masked_row_mean(logps - old_logps, mask).unsqueeze(-1)


def sequence_token_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return log s_t = sg[log s] + log π(y_t) − sg[log π(y_t)] of each token, ``[B, T]``; 0 where masked. sg stops the
    gradient.

    GSPO-token (arXiv 2507.18071, eq. 14): the value is the ratio s of the whole response, the gradient is that of the
    token, so tokens of a row may have different advantages. If they all have one advantage, value and gradient are
    GSPO's.
    """
    own = safe(logps - logps.detach(), mask)  # 0, with the gradient of logps
    return safe(sequence_log_ratio(logps.detach(), old_logps, mask) + own, mask)


def product_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return log Π_t ρ_t = Σ_t log ρ_t of each row, ``[B, 1]``: the importance weight of a response, not normalised by
    length.

    It is clamped at ``MAX_LOG_PRODUCT``, since its exponential would soon overflow; a clamped response has no gradient
    through it. A lower clamp is not needed: e^−∞ is 0.
    """
    return masked_sum(logps - old_logps, mask, dim=-1).clamp(max=MAX_LOG_PRODUCT).unsqueeze(-1)


_LEVELS = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
    "sequence_token": sequence_token_log_ratio,
    "product": product_log_ratio,
}


def log_ratio(level: str, logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return the log-ratio at ``level``: ``[B, T]``, or ``[B, 1]`` for ``sequence`` and ``product``. Raises ValueError
    for a level that is not in ``RATIO_LEVELS``."""
    if level not in _LEVELS:
        raise ValueError(f"`ratio` is {level!r}; it must be one of {RATIO_LEVELS}")
    return _LEVELS[level](logps, old_logps, mask)


def literal_log_ratios(level: str, steps: list[float]) -> list[float]:
    """Return the log-ratio of each token of one response in plain floats, for the start-up proof.

    Args:
        level: one of ``RATIO_LEVELS``.
        steps: log π(y_t) − log π_old(y_t) of each token.
    """
    if level == "token":
        return steps
    if level == "product":
        one = min(sum(steps), MAX_LOG_PRODUCT)
    else:
        one = sum(steps) / len(steps)
    return [one] * len(steps)
