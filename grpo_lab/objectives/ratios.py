"""Importance ratios of the policy against its older self. (Against the sampler: ``corrections``.)

All are kept as logarithms until the last moment, in float32 or wider.
"""

from __future__ import annotations

from torch import Tensor

from grpo_lab.batch import masked_row_mean, masked_sum, safe

RATIO_LEVELS: tuple[str, ...] = ("token", "sequence", "sequence_token", "product")
MAX_LOG_PRODUCT = 40.0
"""Largest log, in nats, of the plain product of a response's ratios. Its square is still a number: float32 ends at e⁸⁸.
"""


def token_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log ρ_t = log π_θ(y_t) − log π_old(y_t), ``[B, T]``; 0 where masked. GRPO (arXiv 2402.03300, eq. 3)."""
    return safe(logps - old_logps, mask)


def sequence_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log s = 1/|y| Σ_t log ρ_t, ``[B, 1]``: the length-normalised ratio of GSPO (arXiv 2507.18071, eq. 7)."""
    return masked_row_mean(logps - old_logps, mask).unsqueeze(-1)


def sequence_token_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log s_{i,t} = sg[log s_i] + log π(y_t) − sg[log π(y_t)], ``[B, T]``; 0 where masked.

    GSPO-token (arXiv 2507.18071, eq. 14): the value is the whole response's ratio, the gradient each token's own, so
    tokens may have different advantages. With one advantage for a row, value and gradient are those of GSPO.
    """
    own = safe(logps - logps.detach(), mask)  # 0, with the gradient of logps
    return safe(sequence_log_ratio(logps.detach(), old_logps, mask) + own, mask)


def product_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log Π_t ρ_t = Σ_t log ρ_t, ``[B, 1]``: the plain importance weight of a response, not normalised by its length.

    Clamped at ``MAX_LOG_PRODUCT``, since its exponential would soon overflow; a clamped response has no gradient
    through it. There is no lower clamp: e^−∞ is 0.
    """
    return masked_sum(logps - old_logps, mask, dim=-1).clamp(max=MAX_LOG_PRODUCT).unsqueeze(-1)


_LEVELS = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
    "sequence_token": sequence_token_log_ratio,
    "product": product_log_ratio,
}


def log_ratio(level: str, logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return the log-ratio at ``level``: ``[B, T]``, or ``[B, 1]`` for ``sequence`` and ``product``."""
    if level not in _LEVELS:
        raise ValueError(f"`ratio` is {level!r}; it must be one of {RATIO_LEVELS}")
    return _LEVELS[level](logps, old_logps, mask)


def literal_log_ratios(level: str, steps: list[float]) -> list[float]:
    """Return the log-ratio of each token of one response as plain floats. ``steps`` holds log π(y_t) − log
    π_old(y_t)."""
    if level == "token":
        return steps
    if level == "product":
        one = min(sum(steps), MAX_LOG_PRODUCT)
    else:
        one = sum(steps) / len(steps)
    return [one] * len(steps)
