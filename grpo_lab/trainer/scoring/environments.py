"""Environments that own their reward (``get_reward``) count among the rewards that the caller gave.

TRL adds their column by itself, inside its constructor. A named trainer must know of it before: it completes what is given
(``declared_rewards``), and without any reward it would bring its own beside the environment's. So each such environment stands
in the list as an ``EnvironmentReward`` while that is asked, under the name that TRL will give its column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EnvironmentReward:
    """A place in the list of given rewards; TRL calls the environment itself."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, **_: Any) -> list[float | None]:
        raise RuntimeError(f"the reward of the environment {self.__name__!r} is TRL's to call (`environment_factory`)")


class FirstMade:
    """A factory whose first instance was made already: TRL looks at one as well, and environments are made once."""

    def __init__(self, factory: Callable[[], Any], instance: Any) -> None:
        self._factory, self._waiting = factory, [instance]

    def __call__(self) -> Any:
        return self._waiting.pop() if self._waiting else self._factory()


def with_environment_rewards(cls: Any, given: Any, factory: Any, completes: bool) -> tuple[Any, Any]:
    """(rewards given and those that environments own, the factories to hand on).

    Looked at only where ``cls`` completes rewards (``completes``). A class says by itself what it has; another factory is called once.
    """
    if factory is None or not completes:
        return given, factory
    rewards = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    factories, several = (dict(factory), True) if isinstance(factory, dict) else ({None: factory}, False)
    kinds = []
    for name, make in factories.items():
        kind = make
        if not isinstance(make, type):
            instance = make()
            kind, factories[name] = type(instance), FirstMade(make, instance)
        if callable(getattr(kind, "get_reward", None)) and kind not in kinds:
            kinds.append(kind)
    marked = [*rewards, *(EnvironmentReward(kind.__name__) for kind in kinds)]
    return marked, factories if several else factories[None]


def without_environment_rewards(rewards: list[Any]) -> list[Any]:
    """What is left for TRL's ``reward_funcs``."""
    return [reward for reward in rewards if not isinstance(reward, EnvironmentReward)]


__all__ = ["EnvironmentReward", "with_environment_rewards", "without_environment_rewards"]
