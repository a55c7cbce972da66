"""Environments: their classes, the rewards that they compute themselves, and what they offer to the run and not to the
policy.

TRL makes a tool of every public method of an environment's class but ``reset`` and ``get_reward``: it asks ``inspect``
for them when its trainer is built, and again before each generation. We have further methods that only the run calls
(``OFFERED``: rewards of turns, the state for a resume). Without ``offers_hidden`` the policy could call them as tools.
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
    """Stands for the module ``inspect`` in TRL's trainer, which asks it for the methods of an environment's class."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, owner: Any, predicate: Any = None) -> list[tuple[str, Any]]:
        """Return what ``inspect.getmembers`` does, without the methods in ``OFFERED``."""
        return [member for member in inspect.getmembers(owner, predicate) if member[0] not in OFFERED]


def offers_hidden(hidden: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which TRL makes no tools of the methods in ``OFFERED``, if ``hidden``. It is needed around
    TRL's constructor and around each generation: both look for an environment's tools."""
    if not hidden:
        return contextlib.nullcontext()
    return replaced(grpo_trainer, "inspect", _WithoutOffers())


def not_used_again(trainer: Any, rows: Collection[int]) -> None:
    """Remove the environments of ``rows`` from TRL's pool, so that later batches get new ones. A tool call that was
    given up still runs in its thread, and may change its environment at any time."""
    gone = {id(trainer.environments[row]) for row in rows}
    for pool in trainer._environment_pool.values():
        pool[:] = [one for one in pool if id(one) not in gone]


class EnvironmentReward:
    """Placeholder for the reward that an environment computes itself (``get_reward``).

    It stands among the given rewards until TRL's constructor is called, so that a named trainer does not add its
    default reward. Then it is removed: TRL adds a column of this name by itself, and calls the environment.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name


class ReuseFirstInstance:
    """Environment factory whose first call returns ``instance``, which was made earlier; later calls make new ones. So
    the environment that we made to learn its class is also the one that TRL looks at."""

    def __init__(self, factory: Callable[[], Any], instance: Any) -> None:
        self._factory = factory
        self._waiting = [instance]

    def __call__(self) -> Any:
        if self._waiting:
            return self._waiting.pop()
        return self._factory()


def environment_kinds(factory: Any) -> tuple[list[type], Any]:
    """Return the classes of the environments that ``factory`` makes (one factory, or name → factory), and the factory
    or factories to pass on to TRL. A factory that is not a class is called once, to learn the class."""
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
