"""Environments: their classes, the rewards that they compute themselves, and what they offer to the run and not to the
policy.

TRL makes a tool of every public method of an environment's class but ``reset`` and ``get_reward``: it asks ``inspect``
for them when it is built, and again before each generation. What ``turns.turn_settings`` lists (scores of turns, the
state for a resume) would be a tool, too, and the policy could call it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

from trl.trainer import grpo_trainer

from grpo_lab.trainer.trl_bridge.names import replaced

__all__ = ["OFFERED", "EnvironmentReward", "environment_kinds", "not_used_again", "offers_hidden"]

#: Methods that the run calls itself (``turns.turn_settings``), beside TRL's ``reset`` and ``get_reward``.
OFFERED = ("turn_rewards", "state_dict", "load_state_dict")


class _WithoutOffers:
    """In the place of ``inspect`` in TRL's trainer, which asks it for the methods of an environment's class."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, owner: Any, predicate: Any = None) -> list[tuple[str, Any]]:
        """Return ``inspect.getmembers`` without what an environment offers."""
        return [member for member in inspect.getmembers(owner, predicate) if member[0] not in OFFERED]


def offers_hidden(hidden: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which TRL makes no tools of ``OFFERED``, if ``hidden``. Its constructor finds an
    environment's tools, and each generation again."""
    if not hidden:
        return contextlib.nullcontext()
    return replaced(grpo_trainer, "inspect", _WithoutOffers())


def not_used_again(trainer: Any, rows: Collection[int]) -> None:
    """Keep TRL from resetting the environments of ``rows`` for a later batch: it makes new ones instead. A call that
    was given up goes on in its thread, and may still change the environment that it is a method of."""
    gone = {id(trainer.environments[row]) for row in rows}
    for pool in trainer._environment_pool.values():
        pool[:] = [one for one in pool if id(one) not in gone]


class EnvironmentReward:
    """Placeholder for the reward that an environment computes itself (``get_reward``). It is among the given rewards
    while a named trainer completes them, which would otherwise add its default reward. It is removed before TRL's
    constructor: TRL adds a column of this name by itself, and calls the environment."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


class ReuseFirstInstance:
    """Environment factory whose first call returns an ``instance`` that was made earlier; later calls make new ones.
    TRL looks at an instance, as we do, and each environment should be made only once."""

    def __init__(self, factory: Callable[[], Any], instance: Any) -> None:
        self._factory = factory
        self._waiting = [instance]

    def __call__(self) -> Any:
        if self._waiting:
            return self._waiting.pop()
        return self._factory()


def environment_kinds(factory: Any) -> tuple[list[type], Any]:
    """Return the classes of the environments, and the factories to pass on to TRL. A factory that is not a class is
    called once, to learn the class of its environments."""
    if isinstance(factory, dict):
        factories = dict(factory)
    else:
        factories = {None: factory}
    kinds: list[type] = []
    for name, make in factories.items():
        kind = make
        if not isinstance(make, type):
            instance = make()
            kind = type(instance)
            factories[name] = ReuseFirstInstance(make, instance)
        if kind not in kinds:
            kinds.append(kind)
    return kinds, factories if isinstance(factory, dict) else factories[None]
