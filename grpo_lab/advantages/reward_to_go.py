"""Reward-to-go: every token gets what the policy's tokens from there on are paid."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_lab.masked import safe


def reward_to_go(values: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = Σ_{s ≥ t, s own} γ^{n(t,s)} · v_s, where n(t,s) is the number of own tokens from t (inclusive) to s (exclusive).

    Own are the tokens that the policy made (``mask``): tool output and padding are no time steps, pay nothing and get 0. Computed by
    doubling (after pass k a token holds its next 2ᵏ own tokens), so T tokens take log₂ T passes and every number is a sum of T
    terms at most.

    Args:
        values: ``[B, T]``; read only where ``mask`` is True.
        mask: bool ``[B, T]``.
        gamma: discount in [0, 1] per own token.
    """
    if not (math.isfinite(gamma) and 0 <= gamma <= 1):
        raise ValueError(f"gamma is {gamma}; a discount lies in [0, 1]")
    order = (~mask).long().argsort(dim=1, stable=True)  # own tokens first, in their order
    summed = safe(values, mask).gather(1, order)
    width, reach = summed.size(1), 1
    while reach < width:
        ahead = torch.nn.functional.pad(summed[:, reach:], (0, reach))
        summed = summed + gamma**reach * ahead
        reach *= 2
    return torch.zeros_like(summed).scatter(1, order, summed).masked_fill(~mask, 0.0)


__all__ = ["reward_to_go"]
