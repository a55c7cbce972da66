"""Rewards → advantages. Pure torch; one rule a file. ``advantage_rule(name)`` finds one, ``RULES`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_lab import registry
from grpo_lab.advantages.batch_zscore import BatchZScore
from grpo_lab.advantages.group_max import GroupMax
from grpo_lab.advantages.group_mean import GroupMean
from grpo_lab.advantages.group_zscore import GroupZScore
from grpo_lab.advantages.leave_one_out import LeaveOneOut
from grpo_lab.advantages.process import Process, StepTable, spread
from grpo_lab.advantages.raw import Raw

AdvantageRule = Callable[[Tensor, int], Tensor]
"""``rule(rewards [N], group_size) -> advantages [N]``; groups contiguous; NaN rewards (unscorable) get 0.

A class attribute ``level`` says what it makes: ``"row"`` (also where nothing is said), or ``"token"``: in two stages, as ``process``."""

RULES: dict[str, Callable[..., AdvantageRule]] = {
    "raw": Raw,
    "group_mean": GroupMean,
    "group_zscore": GroupZScore,
    "batch_zscore": BatchZScore,
    "leave_one_out": LeaveOneOut,
    "group_max": GroupMax,
}
LEVELS = ("row", "token")
RESERVED = ("name",)
"""Keys of ``advantage: {…}`` that cannot be knobs."""

#: rules of ``level`` "token", in two stages: ``normalised`` on the table of all ranks, ``spread`` on this rank's rows
TOKEN_RULES: dict[str, Callable[..., Any]] = {"process": Process}

__all__ = [
    "RULES",
    "TOKEN_RULES",
    "AdvantageRule",
    "BatchZScore",
    "GroupMax",
    "GroupMean",
    "GroupZScore",
    "LeaveOneOut",
    "Process",
    "Raw",
    "StepTable",
    "advantage_rule",
    "level_of",
    "register_advantage",
    "spread",
]


def advantage_rule(name: str, **parameters: Any) -> Any:
    """The rule called ``name`` with its parameters, the fields of its dataclass. ``ValueError`` for an unknown name or parameter."""
    return registry.built(registry.found({**RULES, **TOKEN_RULES}, name, "advantage"), parameters, "advantage")


def level_of(rule: Any) -> str:
    """``"row"`` or ``"token"``: what a rule (or its class) makes an advantage for. ValueError for another ``level``."""
    level = getattr(rule, "level", "row")
    if level not in LEVELS:
        raise ValueError(f"`advantage` {registry.address(rule)} has level {level!r}; it must be one of {LEVELS}")
    return str(level)


def register_advantage(name: str, part: Any = None) -> Any:
    """Make ``advantage: name`` mean ``part``: a function, or a dataclass whose fields are its knobs. Also a decorator.

    Raises:
        ValueError: the name is another object's already, or the part cannot be called (or, of level "token", spread).
    """
    if part is None:
        return lambda later: register_advantage(name, later)
    rules = {**RULES, **TOKEN_RULES}
    if level_of(part) == "row":
        registry.add(rules, name, part, RESERVED, "advantage rule")
        RULES[name] = part
        return part
    if not callable(getattr(part, "normalised", None)):
        raise ValueError(
            f"advantage rule {registry.address(part)} has level 'token', but no method `normalised(table)`"
        )
    registry.check_name(rules, name, part, "advantage rule")
    TOKEN_RULES[name] = part
    return part
