"""Rewards → advantages. Pure torch; one rule a file. ``advantage_rule(name)`` finds one, ``RULES`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_lab.advantages.batch_zscore import BatchZScore
from grpo_lab.advantages.group_max import GroupMax
from grpo_lab.advantages.group_mean import GroupMean
from grpo_lab.advantages.group_zscore import GroupZScore
from grpo_lab.advantages.leave_one_out import LeaveOneOut
from grpo_lab.advantages.raw import Raw

AdvantageRule = Callable[[Tensor, int], Tensor]
"""``rule(rewards [N], group_size) -> advantages [N]``; groups contiguous; NaN rewards (unscorable) get 0."""

RULES: dict[str, Callable[..., AdvantageRule]] = {
    "raw": Raw,
    "group_mean": GroupMean,
    "group_zscore": GroupZScore,
    "batch_zscore": BatchZScore,
    "leave_one_out": LeaveOneOut,
    "group_max": GroupMax,
}

__all__ = [
    "RULES",
    "AdvantageRule",
    "BatchZScore",
    "GroupMax",
    "GroupMean",
    "GroupZScore",
    "LeaveOneOut",
    "Raw",
    "advantage_rule",
]


def advantage_rule(name: str, **parameters: Any) -> AdvantageRule:
    """The rule called ``name`` with its parameters. Raises ``ValueError`` for an unknown name or parameter."""
    if name not in RULES:
        raise ValueError(f"`advantage` is {name!r}; it must be one of {sorted(RULES)}, or a callable")
    try:
        return RULES[name](**parameters)
    except TypeError as error:
        raise ValueError(f"`advantage` {name!r} does not take {sorted(parameters)}: {error}") from error
