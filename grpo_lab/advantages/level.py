"""Whether a rule makes one advantage a completion or one a token: an attribute of the rule, never its type.

    level = "row"      (default)  rule(rewards [N], group_size) -> [N], on the rewards of all ranks
    level = "token"               rule(table) -> [B, T], for this rank's rows (``table.local``); NaN and infinity are refused

A rule of level ``token`` works in two stages. One: statistics, on the table of all ranks (``values``, ``total``, ``steps``), which is small
and the same everywhere. Two: spread on ``table.local`` (``rows``, ``mask``, ``lengths``), so that ``[N, T]`` exists nowhere. What it puts on
tokens without loss is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

LEVELS = ("row", "token")

Rule = TypeVar("Rule", bound=Callable[..., Any])


def level_of(rule: Any) -> str:
    """``row`` or ``token``. Raises ``ValueError`` for another level."""
    level = str(getattr(rule, "level", "row"))
    if level not in LEVELS:
        raise ValueError(f"an advantage rule's `level` is {level!r}; it must be one of {LEVELS} (`advantage`)")
    return level


def reads_steps(rule: Any) -> bool:
    """Whether the rule makes advantages of step scores (``table.steps``), so that a run without a step reward is a mistake."""
    return bool(getattr(rule, "reads_steps", False))


def token_rule(rule: Rule) -> Rule:
    """Decorator: ``f(table) -> [B, T]`` is a rule of level ``token``."""
    rule.level = "token"  # type: ignore[attr-defined]
    return rule


__all__ = ["LEVELS", "level_of", "reads_steps", "token_rule"]
