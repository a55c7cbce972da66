"""Whitening over the unmasked tokens of all ranks: each rank computes moments, these are joined, and each whitens its
rows.

The functions below ask an advantage rule what it is, by its attributes and never by its type. Its ``level`` says
whether it makes one advantage per completion or per token:

    level = "row"      (default)  rule(rewards [N], group_size) -> [N], on the rewards of all ranks
    level = "table"               rule(table) -> [N], the same; it sees each reward, and lengths
    level = "token"               rule(table) -> [B, T], for this rank's rows (``table.local``); finite

A rule of level ``token`` works in two stages. It computes statistics on the table of all ranks, which is small and the
same everywhere. It then spreads them over ``table.local``, so that no tensor ``[N, T]`` exists. Tokens without loss are
not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lab.batch import masked_sum, safe

#: Number that is added under the root, as in TRL's deleted PPOTrainer. Its variance was over n − 1; here it is over n,
#: as AlpacaFarm's.
EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of tokens. The variance divides by the count n, not by n − 1."""

    count: float
    mean: float
    variance: float

    @staticmethod
    def joined(parts: Tensor) -> Moments:
        """Join the moments of several parts, ``[R, 3]`` (one row of ``masked_moments`` each), into those of their
        union. A part without tokens adds nothing.

        The squared distances are added as M2 = Σ_r M2_r + Σ_r n_r (m_r − m)², which never subtracts two large sums
        (Chan, Golub, LeVeque 1979).
        """
        counts, means, squares = parts.double().cpu().unbind(1)
        count = counts.sum()
        if count == 0:
            return Moments(0.0, 0.0, 0.0)
        mean = (counts * means).sum() / count
        spread = squares.sum() + (counts * (means - mean).square()).sum()
        return Moments(count.item(), mean.item(), (spread / count).item())


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return float64 ``[3]``: the number of tokens, their mean, and the sum of their squared distances from it.

    Args:
        values: ``[B, T]``, read only where ``mask`` is True.
        mask: bool ``[B, T]``.
    """
    values = safe(values, mask).double()
    count = mask.sum().double()
    mean = masked_sum(values, mask) / count.clamp(min=1)
    return torch.stack([count, mean, masked_sum((values - mean).square(), mask)])


def whiten(values: Tensor, mask: Tensor, moments: Moments, shift_mean: bool = True) -> Tensor:
    """Return (x − mean)/√(variance + 1e-8), or that plus the mean if ``shift_mean`` is False; 0 where ``mask`` is
    False.

    Args:
        values: x, ``[B, T]``.
        mask: bool ``[B, T]``.
        moments: of the tokens of all ranks.
        shift_mean: True makes the mean 0 (advantages); False keeps it (rewards: their sign has a meaning).
    """
    scaled = (safe(values, mask, moments.mean) - moments.mean) / (moments.variance + EPSILON) ** 0.5
    return safe(scaled if shift_mean else scaled + moments.mean, mask)


LEVELS = ("row", "table", "token")

Rule = TypeVar("Rule", bound=Callable[..., Any])


def level_of(rule: Any) -> str:
    """Return the rule's level, ``row``, ``table`` or ``token``. Raises ValueError if its attribute ``level`` is another
    one."""
    level = str(getattr(rule, "level", "row"))
    if level not in LEVELS:
        raise ValueError(f"an advantage rule's `level` is {level!r}; it must be one of {LEVELS} (`advantage`)")
    return level


def reads_steps(rule: Any) -> bool:
    """Return whether the rule computes advantages from step scores (``table.steps``), so that a run with it needs a
    step reward."""
    return bool(getattr(rule, "reads_steps", False))


def takes_penalty(rule: Any) -> bool:
    """Return whether a KL penalty may be subtracted from the reward that the rule reads. It may not if the rule asks
    which completions succeeded, or divides each reward by its own deviation."""
    return bool(getattr(rule, "takes_penalty", True))


def token_rule(rule: Rule) -> Rule:
    """Mark a function ``f(table) -> [B, T]`` as an advantage rule of level ``token``, and return it. Usable as a
    decorator."""
    rule.level = "token"  # type: ignore[attr-defined]
    return rule
