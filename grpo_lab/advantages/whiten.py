"""Whitening over the real tokens of all ranks: each makes its moments, these are joined, and each whitens its own.

Whether a rule makes one advantage a completion or one a token: an attribute of the rule, never its type.

    level = "row"      (default)  rule(rewards [N], group_size) -> [N], on the rewards of all ranks
    level = "token"               rule(table) -> [B, T], for this rank's rows (``table.local``); finite

A rule of level ``token`` works in two stages: statistics on the table of all ranks, which is small and the same
everywhere; then spread on ``table.local``, so that ``[N, T]`` exists nowhere. Tokens without loss are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lab.batch import masked_sum, safe

#: under the root, as in TRL's deleted PPOTrainer (variance over n − 1); AlpacaFarm's is over n, as here
EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance (over the count: of these tokens, not of what they were drawn from)."""

    count: float
    mean: float
    variance: float

    @staticmethod
    def joined(parts: Tensor) -> Moments:
        """Join the moments of parts, ``masked_moments`` of each, ``[R, 3]``, into those of the union. Parts without a
        token count nothing.

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


LEVELS = ("row", "token")

Rule = TypeVar("Rule", bound=Callable[..., Any])


def level_of(rule: Any) -> str:
    """``row`` or ``token``. Raises ``ValueError`` for another level."""
    level = str(getattr(rule, "level", "row"))
    if level not in LEVELS:
        raise ValueError(f"an advantage rule's `level` is {level!r}; it must be one of {LEVELS} (`advantage`)")
    return level


def reads_steps(rule: Any) -> bool:
    """Return whether the rule makes advantages of step scores (``table.steps``): then a run needs a step reward."""
    return bool(getattr(rule, "reads_steps", False))


def token_rule(rule: Rule) -> Rule:
    """Decorator: ``f(table) -> [B, T]`` is a rule of level ``token``."""
    rule.level = "token"  # type: ignore[attr-defined]
    return rule
