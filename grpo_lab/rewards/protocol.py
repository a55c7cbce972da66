"""Protocol of rewards: a reward judges single completions, or the whole group of completions that share a prompt.

TRL calls every reward on each rank's *local* rows. If a group is split over ranks, a reward that compares the samples
of a group sees only a part of it there, and no error says so. Here a reward declares in ``scope`` what it needs:

* ``scope = "completion"``, or no ``scope`` at all: any TRL reward, ``(prompts, completions, **columns)``.
* ``scope = "group"``: a ``GroupReward``. ``LabTrainer`` gathers texts, token ids, columns and the values of the other
  rewards from all ranks, builds whole groups, and calls ``score_group`` on each. Every rank computes the same values.
* ``scope = "step"``: a ``StepReward``, which scores each step of a completion (``steps.py``).

A function of five lines under ``@group_reward`` is enough (docs/algorithms/group_rewards.md). In stock TRL the same
object is an ordinary reward function: it rebuilds the groups from runs of equal prompts, or raises ValueError with the
reason. Source: ours (asked for in trl #3896).
"""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, ClassVar, Literal, cast

from grpo_lab.rewards.completion import completion_text
from grpo_lab.verifiers.verdict import checked_scores


def local_group_sizes(prompts: Sequence[Any], num_generations: int | None, name: str) -> list[tuple[int, int]]:
    """Find the groups among this rank's rows, and return each one's ``(index of its first row, number of rows)``.

    The rows of a group follow each other, so groups are found as runs of equal prompts.

    Args:
        prompts: the prompt of each row.
        num_generations: the group size G. A run may hold several groups, as a question can be drawn twice in a row.
            None: each run is one group.
        name: the reward's name, for error messages.

    Raises:
        ValueError: with ``num_generations``, if the length of a run is no multiple of it; without, if there are several
            processes, or the runs do not all have the same length above 1.
    """
    runs = [len(list(equal)) for _, equal in groupby(prompts)]
    lengths = sorted(set(runs))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    wrong = None
    if num_generations is not None and any(size % num_generations for size in lengths):
        wrong = (
            f"{name} needs whole groups of num_generations={num_generations}, but the local rows hold runs of equal "
            f"prompts of lengths {lengths}"
        )
    elif num_generations is None and processes > 1:
        wrong = (
            f"{name} sees only this process's rows (1 of {processes}) and does not know whether its groups are whole; "
            "`num_generations` lets it check"
        )
    elif num_generations is None and (len(lengths) > 1 or lengths == [1]):
        wrong = (
            f"{name} cannot find whole groups: runs of equal prompts have lengths {lengths} (expected one length, > 1; "
            "give `num_generations` if one prompt can come twice in a row)"
        )
    if wrong:
        raise ValueError(
            f"{wrong}. Stock TRL calls rewards on each process's local rows, so a group that is split over processes "
            "reaches its group reward in pieces. Use grpo_lab.LabTrainer, which gathers first and scores whole groups"
        )
    starts = accumulate(runs, initial=0)
    return [
        (start + offset, num_generations or size)
        for start, size in zip(starts, runs)
        for offset in range(0, size, num_generations or size)
    ]


def refuse_waiting(call: Any, what: str) -> None:
    """Raise ValueError, naming ``what``, if ``call`` is an ``async def``: it is called synchronously, and nobody would
    await it."""
    while isinstance(call, partial):
        call = call.func
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(type(call), "__call__", None)):  # noqa: B004
        raise ValueError(
            f"{what} is an `async def`, and nobody awaits it: `score_group` gives its numbers at once. Write it as "
            "`def` and wait inside (`asyncio.run`), or make what waits a completion reward, which may be `async def` "
            "in `reward_funcs`, and name that in `requires`"
        )


def check_requires(requires: Any) -> None:
    """Raise ValueError if ``requires``, names of the rewards that a group reward reads, holds anything but strings or
    is a bare string, which would be read as its letters."""
    if isinstance(requires, str) or not all(isinstance(name, str) for name in requires):
        raise ValueError(f"`requires` is {requires!r}; it is a tuple of reward names, such as ('accuracy_reward',)")


Scope = Literal["completion", "group", "step"]
Values = list[float | None]
CompletionReward = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class Group:
    """All G samples of one prompt, in the order of generation. Lists have length G; lengths are in tokens.

    Attributes:
        prompt: the prompt as in the data set: text or message list.
        completions: the texts.
        completion_ids: token ids without padding.
        lengths: number of completion tokens (``len`` of the ids).
        truncated: whether the token budget, not an end token, stopped the sample; ``None`` = not known (in stock TRL).
        rewards: values of the completion-scope rewards by reward name, without weights; ``None`` = unscorable.
        columns: the data set's columns, one value per sample.
        step, max_steps: training progress in optimizer steps.
        messages: the completions as TRL passes them: texts, or message lists with every turn of a tool rollout.
            ``completions`` holds only the last answer's text. ``None`` if the group is made without them.
        environments: one per sample, if the run has environments and the reward sets ``reads_environments``.
    """

    prompt: Any
    completions: list[str]
    completion_ids: list[list[int]]
    lengths: list[int]
    truncated: list[bool] | None = None
    rewards: Mapping[str, Values] = field(default_factory=dict)
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    step: int = 0
    max_steps: int = 0
    messages: list[Any] | None = None
    environments: list[Any] | None = None

    def __post_init__(self) -> None:
        size = len(self.completions)
        own = ("completion_ids", "lengths", "truncated", "messages", "environments")
        lists: dict[str, Sequence[Any] | None] = {name: getattr(self, name) for name in own}
        for kind, found in (("rewards", self.rewards), ("columns", self.columns)):
            lists |= {f"{kind}[{name!r}]": values for name, values in found.items()}
        wrong = {name: len(values) for name, values in lists.items() if values is not None and len(values) != size}
        if size == 0 or wrong:
            raise ValueError(f"a group has one entry per completion; it has {size} completions but {wrong} entries")

    def __len__(self) -> int:
        return len(self.completions)


class GroupReward(ABC):
    """Base class of rewards of scope ``group``; a subclass implements ``score_group``.

    Args:
        num_generations: the group size G. Needed in stock TRL with more than one process; with one process it is
            inferred from the prompts.
        sources: completion rewards by name. One is called if the run does not supply the values of that reward, which
            stock TRL never does: it shows no reward the values of another.

    Attributes:
        requires: names of the completion rewards whose values ``score_group`` reads (``required``).
    """

    scope: ClassVar[Scope] = "group"
    requires: tuple[str, ...] = ()
    #: Whether ``group.environments`` holds the rollouts' environments. With several ranks they are pickled and sent to
    #: the others.
    reads_environments: bool = False

    def __init__(
        self, *, num_generations: int | None = None, sources: Mapping[str, CompletionReward] | None = None
    ) -> None:
        if num_generations is not None and num_generations < 1:
            raise ValueError(f"`num_generations` must be at least 1, got {num_generations}")
        self.num_generations = num_generations
        self.sources = dict(sources or {})
        for name, source in self.sources.items():
            refuse_waiting(source, f"`sources[{name!r}]` of {self.name}")

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        refuse_waiting(cls.score_group, f"{cls.__name__}.score_group")
        if isinstance(cls.requires, str):
            check_requires(cls.requires)

    @property
    def name(self) -> str:
        """The name under which the value is logged."""
        return str(getattr(self, "__name__", type(self).__name__))

    @abstractmethod
    def score_group(self, group: Group) -> Sequence[float | None]:
        """Return one number per completion of one whole group; ``None`` = unscorable."""

    def required(self, name: str, group: Group) -> Values:
        """Return the values of the completion reward ``name`` for the samples of ``group``.

        They are in ``group.rewards`` if the run has this reward; else ``sources[name]`` computes them. Raises
        ValueError without either.
        """
        if name in group.rewards:
            return group.rewards[name]
        if name in self.sources:
            values = self.sources[name](
                prompts=[group.prompt] * len(group),
                completions=group.completions if group.messages is None else group.messages,
                completion_ids=group.completion_ids,  # TRL hands them to every reward
                **group.columns,
            )
            return checked_scores(values, len(group), f"reward {name!r} (`sources` of {self.name})")
        raise ValueError(
            f"{self.name} needs the values of reward {name!r}, and this run has only {sorted(group.rewards)}. "
            f"Add it to `reward_funcs` of LabTrainer, or hand the callable itself to {self.name} (stock TRL shows no "
            "reward the values of another one)"
        )

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Any = None,
        **columns: Any,
    ) -> Values:
        """Score local rows, as stock TRL calls a reward. Raises ValueError if whole groups cannot be rebuilt from
        them."""
        if completion_ids is None:
            raise ValueError(f"{self.name} counts tokens: call it with `completion_ids`, as TRL does")
        if trainer_state is None and self.needs_progress():
            raise ValueError(
                f"{self.name} depends on the training step: call it with `trainer_state`, as TRL does, or use a "
                "constant weight"
            )
        rows = {
            name: values for name, values in columns.items() if isinstance(values, list) and len(values) == len(prompts)
        }
        environments = rows.pop("environments", None)
        groups = []
        for start, size in local_group_sizes(prompts, self.num_generations, self.name):
            place = slice(start, start + size)
            ids = [list(row) for row in completion_ids[place]]
            groups.append(
                Group(
                    prompt=prompts[start],
                    completions=[completion_text(completion) for completion in completions[place]],
                    completion_ids=ids,
                    lengths=[len(row) for row in ids],
                    columns={name: column[place] for name, column in rows.items()},
                    messages=list(completions[place]),
                    environments=environments[place] if environments and self.reads_environments else None,
                    step=int(getattr(trainer_state, "global_step", 0)),
                    max_steps=int(getattr(trainer_state, "max_steps", 0)),
                )
            )
        return score_groups(self, groups)

    def needs_progress(self) -> bool:
        """Return whether the value depends on the training step, so that a call without it must be refused."""
        return False


def score_groups(reward: GroupReward, groups: Sequence[Group], keep_infinite: bool = False) -> Values:
    """Return ``score_group``'s values for all groups, in one list. Raises ValueError unless each group has G values,
    each finite, ``None`` or NaN (unscorable). ``keep_infinite`` allows infinite ones."""
    who = f"group reward {reward.name!r} (`reward_funcs`)"
    return [
        score
        for group in groups
        for score in checked_scores(reward.score_group(group), len(group), who, infinite=keep_infinite)
    ]


def scope_of(reward: Any) -> Scope:
    """Return ``reward.scope``, or ``completion`` if it declares none (any stock TRL reward). Raises ValueError for
    an unknown scope."""
    scope = getattr(reward, "scope", "completion")
    if scope not in ("completion", "group", "step"):
        raise ValueError(f"reward {reward!r} declares scope {scope!r}; allowed: 'completion', 'group', 'step'")
    if scope == "group" and not hasattr(reward, "score_group"):
        raise ValueError(f"reward {reward!r} declares scope 'group' but no `score_group`; derive it from GroupReward")
    return cast(Scope, scope)


class _FunctionReward(GroupReward):
    """A ``GroupReward`` that calls a plain function ``group -> values``. It is pickled by its import path, as
    functions are."""

    __qualname__: str

    def __init__(
        self,
        score: Callable[[Group], Sequence[float | None]],
        requires: tuple[str, ...] = (),
        num_generations: int | None = None,
        sources: Mapping[str, CompletionReward] | None = None,
        reads_environments: bool = False,
    ) -> None:
        refuse_waiting(score, getattr(score, "__qualname__", repr(score)))
        if not callable(score) or not hasattr(score, "__qualname__"):
            raise ValueError(
                f"@group_reward decorates a function of one group, got {score!r}; settings are named: "
                "`@group_reward(requires=('accuracy_reward',))`. An object with settings derives from GroupReward"
            )
        super().__init__(num_generations=num_generations, sources=sources)
        self.requires = requires
        self.reads_environments = reads_environments
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(score, name))
        self._score = score

    def score_group(self, group: Group) -> Sequence[float | None]:
        for name in self.requires:
            if name not in group.rewards:
                group = replace(group, rewards={**group.rewards, name: self.required(name, group)})
        return self._score(group)

    def __reduce__(self) -> str | tuple[Any, ...]:
        with suppress(AttributeError):
            # the decorator has put this object in the place of the function: it is found under the function's name
            if attrgetter(self.__qualname__)(sys.modules[self.__module__]) is self:
                return str(self.__qualname__)
        settings = (self.requires, self.num_generations, self.sources, self.reads_environments)
        return type(self), (self._score, *settings)


def group_reward(
    score: Callable[[Group], Sequence[float | None]] | None = None,
    /,
    *,
    requires: tuple[str, ...] = (),
    num_generations: int | None = None,
    sources: Mapping[str, CompletionReward] | None = None,
    reads_environments: bool = False,
) -> Any:
    """Decorator: turn ``def f(group: Group) -> list[float | None]`` into a ``GroupReward`` named ``f``.

    Args:
        score: the function. None if the decorator is written with settings, ``@group_reward(requires=…)``.
        requires: names of the completion rewards whose values the function reads from ``group.rewards``.
        num_generations: as in ``GroupReward``, and so is ``sources``.
        sources: completion rewards by name, for a run that does not have those in ``requires``.
        reads_environments: whether the function reads ``group.environments``.

    Raises:
        ValueError: for an ``async def``, and for anything but a function with a name.
    """
    check_requires(requires)

    def make(score: Callable[[Group], Sequence[float | None]]) -> GroupReward:
        return _FunctionReward(score, tuple(requires), num_generations, sources, reads_environments)

    if score is None:
        return make
    return make(score)
