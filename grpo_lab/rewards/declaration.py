"""What a group reward may be declared as: said where it is written down, and not after the first generation."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

__all__ = ["check_decorated", "check_requires", "refuse_waiting"]


def refuse_waiting(call: Any, what: str) -> None:
    """ValueError for an ``async def``: whole groups are scored on every rank, one after the other, and nobody awaits."""
    while isinstance(call, partial):
        call = call.func
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(type(call), "__call__", None)):  # noqa: B004
        raise ValueError(
            f"{what} is an `async def`, and nobody awaits it: `score_group` gives its numbers at once. Write it as `def` and "
            "wait inside (`asyncio.run`), or make what waits a completion reward, which may be `async def` in "
            "`reward_funcs`, and name that in `requires`"
        )


def check_requires(requires: Any) -> None:
    """ValueError unless ``requires`` is a tuple of names; a bare string would be read as its letters."""
    if isinstance(requires, str) or not all(isinstance(name, str) for name in requires):
        raise ValueError(f"`requires` is {requires!r}; it is a tuple of reward names, such as ('accuracy_reward',)")


def check_decorated(score: Any) -> None:
    """ValueError for what ``@group_reward`` cannot stand on: an ``async def``, no function, a function without a name."""
    refuse_waiting(score, getattr(score, "__qualname__", repr(score)))
    if not callable(score) or not hasattr(score, "__qualname__"):
        raise ValueError(
            f"@group_reward decorates a function of one group, got {score!r}; settings are named: "
            "`@group_reward(requires=('accuracy_reward',))`. An object with settings derives from GroupReward"
        )
