"""Importance ratios: of the policy against its older self, and of the trainer against the sampler.

All of it lives in log space until the last moment, in float32 or wider.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from grpo_lab.masked import masked_row_mean, masked_sum, safe

RatioLevel = Literal["token", "sequence"]
SamplerMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
RATIO_LEVELS: tuple[str, ...] = ("token", "sequence")
SAMPLER_MODES: tuple[str, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def token_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log ρ_t = log π_θ(y_t) − log π_old(y_t), ``[B, T]``; 0 where masked. GRPO (arXiv 2402.03300, eq. 3)."""
    return safe(logps - old_logps, mask)


def sequence_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log s = 1/|y| Σ_t log ρ_t, ``[B, 1]``: the length-normalised ratio of GSPO (arXiv 2507.18071, eq. 7)."""
    return masked_row_mean(logps - old_logps, mask).unsqueeze(-1)


def log_ratio(level: str, logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio at ``level``: ``"token"`` ``[B, T]`` or ``"sequence"`` ``[B, 1]``."""
    if level == "token":
        return token_log_ratio(logps, old_logps, mask)
    if level == "sequence":
        return sequence_log_ratio(logps, old_logps, mask)
    raise ValueError(f"`ratio` is {level!r}; it must be one of {RATIO_LEVELS}")


def sampler_correction(
    trainer_logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """Weight π_trainer/π_sampler that corrects for completions made by another engine than the one that trains.

    ``token_*``: ρ_t per token, ``[B, T]``. ``sequence_*``: Π_t ρ_t per completion, ``[B, 1]``. ``*_truncate`` clamps the
    ratio into ``[clip_min, clip_max]``; ``*_mask`` sets a ratio outside of it to 0 (the token or completion drops out).
    A NaN sampler log-prob (an inserted or unscored token) counts as ratio 1.

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
