"""``tasks``: the tasks of a mixture. Their settings, what does not combine with them, and the algorithm they make.

    tasks: {arithmetic: {weight: 3}, sorting: {objective: dr_grpo, denominators: own}}

The data set names the task of each row in its column ``task``. A task may have an objective or an advantage rule of its
own; the other tasks share the run's. ``mixed`` makes one algorithm of them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from datasets import Dataset
from pydantic import Field

from grpo_lab.advantages import level_of
from grpo_lab.advantages.mixed import MixedAdvantage
from grpo_lab.curation.mixture_order import most_of
from grpo_lab.objectives import MixedObjective, Objective, TaskObjective
from grpo_lab.rewards.for_task import COLUMN
from grpo_lab.settings import must_be, one_of, settings

Weight = Annotated[int | float, Field(gt=0, allow_inf_nan=False), must_be("a finite number above 0")]


@settings()
class TaskSettings:
    """Settings of one of ``tasks``.

    Args:
        weight: the task's share of the prompts, relative to the other tasks' weights.
        objective: its objective, as the run's ``objective`` is written; ``None``: the run's.
        advantage: its advantage rule; ``None``: that of its own objective, or the run's.
        loss_weight: what its loss is multiplied by.
        denominators: ``all``: its losses are averaged over the rows (tokens) of all tasks; ``own``: over its own.
    """

    weight: Weight = 1.0
    objective: Any = None
    advantage: Any = None
    loss_weight: Weight = 1.0
    denominators: Literal["all", "own"] = "all"

    @property
    def has_own_rule(self) -> bool:
        """Whether the task's advantages are made apart from those of the other tasks."""
        return self.objective is not None or self.advantage is not None

    @property
    def has_own_loss(self) -> bool:
        """Whether the task's loss is computed, weighed or averaged apart from that of the other tasks."""
        return self.objective is not None or self.loss_weight != 1.0 or self.denominators == "own"


def _own_parts(tasks: Mapping[str, TaskSettings]) -> Iterator[str]:
    """Yield the names of the settings by which tasks differ from the run's algorithm."""
    for name, task in tasks.items():
        for setting in ("objective", "advantage", "loss_weight", "denominators"):
            if getattr(task, setting) != getattr(TaskSettings, setting):
                yield f"tasks.{name}.{setting}"


def _own_denominators(case: Any) -> str | None:
    """Return the name of a task with ``denominators: own``, if an optimizer step may hold rows of several generation
    batches; else None."""
    own = (name for name, task in case.ours.tasks.items() if task.denominators == "own")
    apart = case.args.steps_per_generation % case.args.gradient_accumulation_steps == 0
    return None if apart else next(own, None)


#: Conflicts, as ``conflicts.Conflict`` describes them, that are checked if ``tasks`` is set.
CONFLICTS: tuple[tuple[Any, str], ...] = (
    (
        lambda c: next((name for name in c.ours.tasks if not name.strip() or "/" in name), None),
        "`tasks` has a task called {found!r}; the name stands in those of its metrics (`tasks/NAME/reward`), so it "
        "must not be empty, nor hold a slash",
    ),
    (
        lambda c: c.ours.sampler is not None,
        "`sampler`={ours.sampler.name!r} and `tasks` both say which prompt comes next: leave one out",
    ),
    (
        lambda c: not c.args.shuffle_dataset,
        "`shuffle_dataset`=False and `tasks`, whose prompts come by the tasks' weights, ask for different orders: "
        "leave one out",
    ),
    (
        lambda c: c.args.ignore_data_skip,
        "`ignore_data_skip`=True would resume with the first prompts again, and `tasks` goes on where it stood: leave "
        "one out",
    ),
    (
        lambda c: c.ours.objective is None and next(_own_parts(c.ours.tasks), None),
        "`{found}` is set, and the loss of the run is TRL's own: set `objective`, for the tasks without one of their "
        "own",
    ),
    (
        _own_denominators,
        "`tasks.{found}.denominators` is 'own', and an optimizer step holds rows of several generation batches "
        "(`gradient_accumulation_steps` {args.gradient_accumulation_steps}, `steps_per_generation` "
        "{args.steps_per_generation}): make `steps_per_generation` a multiple, or leave it out",
    ),
)


def mixed(whole: Any, own: Mapping[str, Any], tasks: Mapping[str, TaskSettings]) -> dict[str, Any]:
    """Combine the algorithms of a mixture's tasks.

    Args:
        whole: the run's algorithm.
        own: the algorithms of the tasks that have an objective or an advantage rule of their own, by task.
        tasks: the settings of all tasks.

    Returns:
        the fields ``objective``, ``advantage`` and ``names`` of the mixture's ``Algorithm``.

    Raises:
        ValueError: a task has a part of its own that only a whole run can have.
    """
    names = list(tasks)
    for name, algorithm in own.items():
        _refuse_parts(name, algorithm, whole)
    apart = [name for name in names if tasks[name].has_own_rule]
    shared = tuple(at for at, name in enumerate(names) if name not in apart)
    rule = whole.advantage
    if apart:
        rules = [(own[name].advantage, (names.index(name),)) for name in apart]
        rule = MixedAdvantage((*rules, *([(whole.advantage, shared)] if shared else [])))
    objective = whole.objective
    if any(task.has_own_loss for task in tasks.values()):
        for name in names:
            _refuse_objective(name, own.get(name, whole).objective)
        objective = MixedObjective.of(
            TaskObjective.of(
                own.get(name, whole).objective,
                name,
                task=at,
                loss_weight=float(task.loss_weight),
                own_denominators=task.denominators == "own",
            )
            for at, (name, task) in enumerate(tasks.items())
        )
    return {"objective": objective, "advantage": rule, "names": {**whole.names, **_words(own, tasks)}}


def _words(own: Mapping[str, Any], tasks: Mapping[str, TaskSettings]) -> dict[str, str]:
    """Return how each task differs from the run, in words, for ``Algorithm.names``."""
    said = {}
    for name, task in tasks.items():
        parts = []
        if name in own:
            parts = [f"{key}={value}" for key, value in own[name].names.items() if key != "kl"]
        if task.loss_weight != 1.0:
            parts.append(f"loss × {task.loss_weight:g}")
        if task.denominators == "own":
            parts.append("averaged over its own rows")
        said[f"task {name}"] = f"({', '.join(parts) or 'as the run'})"
    return said


def _refuse_parts(name: str, algorithm: Any, whole: Any) -> None:
    """Raise ValueError if there is a critic, or an advantage rule per token: neither can be of one task."""
    if algorithm.value is not None or whole.value is not None:
        raise ValueError(
            f"`tasks.{name}` has an objective or a rule of its own, and there is a critic, which all tasks share "
            "(`value`, `objective: ppo`): leave one out"
        )
    of_tokens = "token" in (level_of(algorithm.advantage), level_of(whole.advantage))
    if of_tokens:
        raise ValueError(
            f"`tasks.{name}` has an advantage rule of its own, and a rule that makes advantages per token is of all "
            "tasks: choose rules per completion, or one rule for the run"
        )


def _refuse_objective(name: str, objective: Objective) -> None:
    """Raise ValueError if a task's objective needs micro-batches of that task alone."""
    if objective.local_denominator:
        raise ValueError(
            f"the objective of task {name!r} averages over its own micro-batch (`bnpo`, `local_token_mean`), and the "
            "tasks' losses are added up: choose `token_mean`, or one objective for the run (`tasks`)"
        )
    if objective.selecting:
        raise ValueError(
            f"the objective of task {name!r} chooses among the tokens of a whole micro-batch "
            f"({objective.selecting[0].selection}), where tasks lie together: choose another, or one objective for the "
            "run (`tasks`)"
        )


def check_rows(tasks: Mapping[str, TaskSettings], rows: Any, setting: str) -> None:
    """Raise ValueError unless every row of a data set names one of the tasks. In ``train_dataset`` each task must have
    rows. ``setting``: the argument that the data set is."""
    if not tasks:
        return
    if not isinstance(rows, Dataset):
        if rows is None:
            seen = "there is none"
        else:
            seen = f"it is a {type(rows).__name__}"
        raise ValueError(f"`tasks` reads the column {COLUMN!r} of `{setting}`, a datasets.Dataset, and {seen}")
    if COLUMN not in rows.column_names:
        raise ValueError(
            f"`tasks` reads the column {COLUMN!r} of `{setting}`, which has {rows.column_names}: add it, or leave "
            "`tasks` out"
        )
    found = set(rows.unique(COLUMN))
    for name in sorted(found - tasks.keys(), key=str):
        raise ValueError(f"`{setting}` has rows of task {name!r}, which `tasks` does not have{one_of(name, tasks)}")
    for name in tasks:
        if name not in found and setting == "train_dataset":
            raise ValueError(f"`tasks` has {name!r}, and `{setting}` has no row of it in its column {COLUMN!r}")


def check_enough(tasks: Mapping[str, TaskSettings], rows: Dataset, prompts: int) -> None:
    """Raise ValueError if a task has fewer rows than a generation batch of ``prompts`` prompts may take of it."""
    counts = Counter(rows[COLUMN])
    most = most_of([task.weight for task in tasks.values()], prompts)
    for name, needed in zip(tasks, most, strict=True):
        if counts[name] < needed:
            raise ValueError(
                f"`train_dataset` has {counts[name]} rows of task {name!r}, and a generation batch of {prompts} "
                f"prompts may take {needed} different ones of it (`tasks.{name}.weight`): bring more rows, or lower "
                "its weight"
            )


def check_rewards(tasks: Mapping[str, TaskSettings], rewards: list[Any]) -> None:
    """Raise ValueError if a reward is for a task (``grpo_lab.rewards.for_task``) that is not among ``tasks``."""
    for reward in rewards:
        task = getattr(reward, "task", None)
        if tasks and isinstance(task, str) and task not in tasks:
            raise ValueError(f"reward {reward.__name__!r} is of task {task!r}{one_of(task, tasks)}")
