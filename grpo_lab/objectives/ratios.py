"""Importance ratios: of the policy against its older self, and of the trainer against the sampler.

All are kept as logarithms until the last moment, in float32 or wider.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_lab.batch import masked_row_mean, masked_sum, safe

RATIO_LEVELS: tuple[str, ...] = ("token", "sequence", "sequence_token", "product")
MAX_LOG_PRODUCT = 40.0
"""nats. Where the plain product of a response's ratios is held: its square is still a number, float32 ends at e⁸⁸."""
SAMPLER_MODES: tuple[str, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


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


def sampler_correction(
    trainer_logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """Weight π_trainer/π_sampler that corrects for completions made by another engine than the one that trains.

    ``token_*``: ρ_t per token, ``[B, T]``. ``sequence_*``: Π_t ρ_t per completion, ``[B, 1]``. ``*_truncate`` clamps
    the ratio into ``[clip_min, clip_max]``; ``*_mask`` sets a ratio outside of it to 0 (the token or completion drops
    out). A NaN sampler log-prob (an inserted or unscored token) counts as ratio 1.

    Source: TIS/MIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training"); bounds and
    modes are those of TRL 1.16's ``vllm_importance_sampling_*``. No gradient flows through the weight.
    """
    if mode not in SAMPLER_MODES:
        raise ValueError(f"`vllm_importance_sampling_mode` is {mode!r}; it must be one of {SAMPLER_MODES}")
    with torch.no_grad():
        difference = safe(trainer_logps - sampler_logps, mask).nan_to_num(nan=0.0)
        if mode.startswith("sequence"):
            difference = masked_sum(difference, mask, dim=-1).unsqueeze(-1)
        ratio = difference.exp()
        low = -math.inf if clip_min is None else clip_min
        high = math.inf if clip_max is None else clip_max
        if mode.endswith("truncate"):
            return ratio.clamp(min=low, max=high)
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
