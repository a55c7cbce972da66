"""``group_reward``: a function of a team as a ``GroupReward``, pickled by its address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pickle import PicklingError
from typing import Any, overload

from grpo_lab.rewards.protocol import CompletionReward, Group, GroupReward, check_decorated, check_requires

__all__ = ["group_reward"]


class _FunctionReward(GroupReward):
    """A plain function ``group -> values`` as a ``GroupReward``. Pickled by the function's address, as functions are."""

    def __init__(
        self,
        score: Callable[[Group], Sequence[float | None]],
        requires: tuple[str, ...] = (),
        num_generations: int | None = None,
        sources: Mapping[str, CompletionReward] | None = None,
        reads_environments: bool = False,
    ) -> None:
        check_decorated(score)
        super().__init__(num_generations=num_generations, sources=sources)
        self.requires, self.reads_environments = requires, reads_environments
        self.__name__ = score.__name__
        self.__qualname__ = score.__qualname__
        self.__module__ = score.__module__
        self.__doc__ = score.__doc__
        self._score = score

    def score_group(self, group: Group) -> Sequence[float | None]:
        for name in self.requires:
            if name not in group.rewards:
                group = replace(group, rewards={**group.rewards, name: self.required(name, group)})
        return self._score(group)

    def __reduce__(self) -> tuple[Any, ...]:
        address = (self.__module__, self.__qualname__)
        try:
            _at_address(*address)
        except (ImportError, AttributeError) as error:
            raise PicklingError(f"a group reward is pickled by its address, and {address} is none: {error}") from error
        return (_restore, (*address, self.requires, self.num_generations, self.sources, self.reads_environments))


def _at_address(module: str, qualname: str) -> Any:
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _restore(module: str, qualname: str, *settings: Any) -> GroupReward:
    found = _at_address(module, qualname)
    # After ``@group_reward`` the address holds the reward itself; after ``r = group_reward(f)`` it still holds ``f``.
    return found if isinstance(found, GroupReward) else _FunctionReward(found, *settings)


@overload
def group_reward(score: Callable[[Group], Sequence[float | None]], /) -> GroupReward: ...


@overload
def group_reward(
    *,
    requires: tuple[str, ...] = ...,
    num_generations: int | None = ...,
    sources: Mapping[str, CompletionReward] | None = ...,
    reads_environments: bool = ...,
) -> Callable[[Callable[[Group], Sequence[float | None]]], GroupReward]: ...


def group_reward(
    score: Callable[[Group], Sequence[float | None]] | None = None,
    /,
    *,
    requires: tuple[str, ...] = (),
    num_generations: int | None = None,
    sources: Mapping[str, CompletionReward] | None = None,
    reads_environments: bool = False,
) -> Any:
    """Decorator: ``def f(group: Group) -> list[float | None]`` becomes a ``GroupReward`` named ``f``.

    With or without arguments; they are those of ``GroupReward``. ``requires`` names the completion rewards whose values
    the function reads from ``group.rewards``; ``reads_environments`` gives it ``group.environments``. ValueError for an
    ``async def``, and for what is no function with a name.
    """
    check_requires(requires)
    make = partial(
        _FunctionReward,
        requires=tuple(requires),
        num_generations=num_generations,
        sources=sources,
        reads_environments=reads_environments,
    )
    return make if score is None else make(score)
