"""Whitening over the real tokens of all ranks: each rank makes its moments, the gathered ones are joined, each whitens its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.masked import masked_sum, safe

#: under the root, as in TRL's deleted PPOTrainer, whose variance is over n − 1; AlpacaFarm's is over n, as here, and it adds 1e-8 to the root
EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance (over the count: of these tokens, not of what they were drawn from)."""

    count: float
    mean: float
    variance: float

    @staticmethod
    def joined(parts: Tensor) -> Moments:
        """Of the union, from ``masked_moments`` of each part, ``[R, 3]``. Parts without a token count nothing.

        M2 = Σ_r M2_r + Σ_r n_r (m_r − m)²: no difference of two large sums (Chan, Golub, LeVeque 1979).
        """
        counts, means, squares = parts.double().cpu().unbind(1)
        count = counts.sum()
        if count == 0:
            return Moments(0.0, 0.0, 0.0)
        mean = (counts * means).sum() / count
        spread = squares.sum() + (counts * (means - mean).square()).sum()
        return Moments(count.item(), mean.item(), (spread / count).item())


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """float64 ``[3]``: number of tokens, their mean, and the sum of their squared distances from it.

    Args:
        values: ``[B, T]``, read only where ``mask`` is True.
        mask: bool ``[B, T]``.
    """
    values = safe(values, mask).double()
    count = mask.sum().double()
    mean = masked_sum(values, mask) / count.clamp(min=1)
    return torch.stack([count, mean, masked_sum((values - mean).square(), mask)])


def whiten(values: Tensor, mask: Tensor, moments: Moments, shift_mean: bool = True) -> Tensor:
    """``(x − mean)/√(variance + 1e-8)``, and ``+ mean`` where the mean is not to be shifted; 0 where ``mask`` is False.

    Args:
        values: ``[B, T]``.
        mask: bool ``[B, T]``.
        moments: of the tokens of all ranks.
        shift_mean: False keeps the mean (rewards: their sign has a meaning); True makes it 0 (advantages).
    """
    scaled = (safe(values, mask, moments.mean) - moments.mean) / (moments.variance + EPSILON) ** 0.5
    return safe(scaled if shift_mean else scaled + moments.mean, mask)


__all__ = ["Moments", "masked_moments", "whiten"]
