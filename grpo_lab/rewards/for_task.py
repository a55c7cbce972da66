"""A reward for one task of a mixture: it scores the rows of its task, and gives None to all others.

The data set says the task of a row in its column ``task``. Every row is then scored by the rewards of its own task, and
the weighted sum passes over the others (None). In stock TRL it is an ordinary reward function.

    reward_funcs=[for_task(AccuracyReward(), "arithmetic"), for_task(SortingReward(), "sorting")]

Source: ours. verl chooses the reward of a row by its ``data_source``, prime-rl by its environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_lab.rewards.protocol import Group, GroupReward, Values, scope_of

COLUMN = "task"
"""The column of the data set that names the task of each row."""


def for_task(reward: Any, task: str) -> Any:
    """Wrap ``reward`` so that it scores the rows of ``task`` only; the wrapper's name is ``task/name``.

    ``reward`` may score completions (also as an ``async def``) or groups. Raises ValueError for a reward model, which
    TRL applies to every row, and for a reward of steps.
    """
    if isinstance(reward, str) or not callable(reward) or hasattr(reward, "state_dict"):
        raise ValueError(
            f"reward {reward if isinstance(reward, str) else type(reward).__name__!r} of task {task!r} is a model, "
            "which TRL gives every row: write a reward function that asks it"
        )
    scope = scope_of(reward)
    if scope == "step":
        raise ValueError(
            f"step reward {name_of(reward)!r} of task {task!r}: steps are scored for all rows; give it as "
            "`grpo_lab.rewards.steps_as_outcome(reward)`"
        )
    if scope == "group":
        return GroupForTask(reward, task)
    waits = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(type(reward), "__call__", None))  # noqa: B004
    if waits:
        return AwaitedForTask(reward, task)
    return ForTask(reward, task)


def name_of(reward: Any) -> str:
    """Return the name of a reward; a ``partial`` has the name of its function."""
    while isinstance(reward, partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))


class _Wrapped:
    """Base class of wrappers around a reward. An attribute that the wrapper lacks is read from the reward inside; a
    tokenizer that a trainer sets is set on the reward inside."""

    reward: Any

    def __getattr__(self, name: str) -> Any:
        if name == "reward" or name.startswith("__"):  # unpickling asks before there is a reward inside
            raise AttributeError(name)
        inside = self.reward
        while isinstance(inside, partial):
            inside = inside.func
        return getattr(inside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tokenizer":
            self.reward.tokenizer = value
        else:
            super().__setattr__(name, value)


class ForTask(_Wrapped):
    """A completion reward of one task; see ``for_task``."""

    def __init__(self, reward: Any, task: str) -> None:
        self.reward = reward
        self.task = task
        self.__name__ = f"{task}/{name_of(reward)}"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Values:
        """Score the rows of the task; None for all others. Raises ValueError if the rows do not say their task."""
        inputs = {"prompts": prompts, "completions": completions, **columns}
        mine, own = self._own(inputs)
        found: Any = []
        if mine:
            found = self.reward(**own)
        return self._spread(mine, found, inputs)

    def _own(self, inputs: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return the indices of the task's rows, and the keyword arguments of the reward with these rows only."""
        rows = len(inputs["completions"])
        tasks = inputs.get(COLUMN)
        if tasks is None:
            raise ValueError(f"reward {self.__name__!r} is of one task, and the rows have no column {COLUMN!r}")
        mine = [row for row, task in enumerate(tasks) if task == self.task]
        own = {
            name: [values[row] for row in mine] if isinstance(values, list) and len(values) == rows else values
            for name, values in inputs.items()
        }
        log = inputs.get("log_extra")
        if log is not None:  # TRL's table of completions needs an entry for every row

            def log_extra(column: str, values: Sequence[Any]) -> None:
                log(column, _scattered(mine, values, rows))

            own["log_extra"] = log_extra
        return mine, own

    def _spread(self, mine: list[int], values: Any, inputs: Mapping[str, Any]) -> Values:
        """Place ``values`` at the rows ``mine``, and None at all others. A result of a wrong form is returned as it
        is."""
        if mine and not (isinstance(values, list | tuple) and len(values) == len(mine)):
            return values  # type: ignore[no-any-return]  # the trainer checks what rewards return
        return _scattered(mine, values, len(inputs["completions"]))


class ByTask:
    """Reward that judges each row by the reward of its task; None for a row whose task has none.

    Args:
        rewards: task → a reward of completions.
    """

    __name__ = "by_task"
    measures_correctness = True

    def __init__(self, rewards: Mapping[str, Any]) -> None:
        self.rewards = {task: for_task(reward, task) for task, reward in rewards.items()}

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Values:
        found: Values = [None] * len(completions)
        for reward in self.rewards.values():
            values = reward(prompts=prompts, completions=completions, **columns)
            found = [own if value is None else value for own, value in zip(found, values, strict=True)]
        return found


class AwaitedForTask(ForTask):
    """A completion reward of one task that is an ``async def``; see ``for_task``."""

    async def __call__(  # type: ignore[override]
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> Values:
        inputs = {"prompts": prompts, "completions": completions, **columns}
        mine, own = self._own(inputs)
        found: Any = []
        if mine:
            found = await self.reward(**own)
        spread: Values = self._spread(mine, found, inputs)
        return spread


class GroupForTask(_Wrapped, GroupReward):
    """A group reward of one task; see ``for_task``. It sees the values of its task's rewards under their own names."""

    def __init__(self, reward: GroupReward, task: str) -> None:
        self.reward = reward
        self.task = task
        super().__init__(num_generations=reward.num_generations)
        self.sources = reward.sources
        self.__name__ = f"{task}/{reward.name}"
        self.requires = tuple(f"{task}/{name}" for name in reward.requires if name not in reward.sources)
        self.reads_environments = reward.reads_environments

    def score_group(self, group: Group) -> Sequence[float | None]:
        tasks = group.columns.get(COLUMN)
        if tasks is None:
            raise ValueError(f"reward {self.__name__!r} is of one task, and the rows have no column {COLUMN!r}")
        if tasks[0] != self.task:
            return [None] * len(group)
        own = {name.removeprefix(f"{self.task}/"): values for name, values in group.rewards.items()}
        scores: Sequence[float | None] = self.reward.score_group(replace(group, rewards=own))
        return scores

    def needs_progress(self) -> bool:
        return bool(self.reward.needs_progress())


def _scattered(mine: Sequence[int], values: Sequence[Any], rows: int) -> list[Any]:
    """Return a list of ``rows`` entries with ``values`` at the indices ``mine``, and None elsewhere."""
    found: list[Any] = [None] * rows
    for row, value in zip(mine, values, strict=True):
        found[row] = value
    return found
