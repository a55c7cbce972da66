"""``mixture`` of a recipe: several data sets, each with its rewards, its weight and, if wanted, its own objective.

It is short for what a recipe can also say without it. ``without_mixture`` writes it out to four keys: ``data`` with the
loader ``mixture``, which joins the rows and writes each row's task into the column ``task``; ``rewards``, each with
``for_task``; the setting ``tasks``; and an ``evaluation`` by task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo_lab.rewards.for_task import COLUMN

if TYPE_CHECKING:
    from datasets import Dataset

LOADER = "mixture"
"""Name of the loader that joins the rows of several tasks."""
BY_TASK = "by_task"
"""Name of the reward that judges each row by its task's reward."""
OF_TRAINING = ("weight", "objective", "advantage", "loss_weight", "denominators")
"""Keys of a task in ``mixture`` that are copied to its entry in ``tasks`` (``TaskSettings``, which checks them)."""


def without_mixture(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's mapping in which ``mixture`` is replaced by what it stands for: ``data``,
    ``rewards``, ``tasks`` and, if its tasks have held-out rows, ``evaluation``. Without ``mixture`` nothing is
    replaced.

    Each task must be a valid ``TaskSection``. Raises ValueError for ``data``, ``rewards`` or ``tasks`` beside
    ``mixture``, and for held-out rows of some tasks only.
    """
    if "mixture" not in written:
        return dict(written)
    for name in ("data", "rewards", "tasks"):
        if name in written:
            raise ValueError(f"`mixture` and `{name}` are both set: a task of `mixture` has its own; leave one out")
    tasks = written["mixture"]
    if not isinstance(tasks, Mapping) or not tasks:
        raise ValueError(f"`mixture` is {tasks!r}; it must be a mapping of tasks, {{name: {{data: …, rewards: …}}}}")
    return {
        **{key: value for key, value in written.items() if key != "mixture"},
        "data": {"loader": LOADER, **{str(name): task["data"] for name, task in tasks.items()}},
        "rewards": [
            {**_as_mapping(reward), "for_task": str(name)} for name, task in tasks.items() for reward in task["rewards"]
        ],
        "tasks": {
            str(name): {key: task[key] for key in OF_TRAINING if task.get(key) is not None}
            for name, task in tasks.items()
        },
        **_evaluation(tasks, written.get("evaluation")),
    }


@contextmanager
def in_its_words(data: Any) -> Iterator[None]:
    """Context that renames settings in a ValueError: ``tasks.…`` becomes ``mixture.…``, as the recipe has it. Nothing
    is renamed unless ``data``, the recipe's section, comes from a ``mixture``."""
    try:
        yield
    except ValueError as error:
        if data is None or data.loader != LOADER or "`tasks." not in str(error):
            raise
        raise type(error)(str(error).replace("`tasks.", "`mixture.")) from error


def _evaluation(tasks: Mapping[str, Any], beside: Any) -> dict[str, Any]:
    """Return ``{"evaluation": …}`` with the held-out rows and rewards of all tasks; an empty dict if no task has any.

    ``beside``: the recipe's own ``evaluation``, whose other keys are kept. Raises ValueError if
    only some tasks have held-out rows, or ``evaluation`` itself sets ``data``, ``reward`` or ``by``.
    """
    held_out = {str(name): task["evaluation"] for name, task in tasks.items() if task.get("evaluation") is not None}
    if not held_out:
        return {}
    lacking = next((name for name in tasks if str(name) not in held_out), None)
    if lacking is not None:
        raise ValueError(
            f"`mixture.{lacking}.evaluation` is missing, and other tasks have one: name held-out rows of all tasks, or "
            "of none"
        )
    for name in ("data", "reward", "by"):
        if name in (beside or {}):
            raise ValueError(f"`evaluation.{name}` is set beside `mixture.<task>.evaluation`: leave one out")
    data = {"loader": LOADER, **{name: one["data"] for name, one in held_out.items()}}
    judges = {name: _judge(one.get("reward") or tasks[name]["rewards"][0]) for name, one in held_out.items()}
    return {"evaluation": {**(beside or {}), "data": data, "reward": {"name": BY_TASK, **judges}, "by": COLUMN}}


def _as_mapping(reward: Any) -> dict[str, Any]:
    """Return a reward of a recipe as a mapping, also if it is a bare name."""
    return dict(reward) if isinstance(reward, Mapping) else {"name": reward}


def _judge(reward: Any) -> dict[str, Any]:
    """Return a task's reward, to judge answers by, without its weight."""
    return {key: value for key, value in _as_mapping(reward).items() if key != "weight"}


def joined(parts: Mapping[str, Dataset]) -> Dataset:
    """Return the rows of all tasks (``parts``: name → rows), one task after the other, with the name of each row's task
    in the column ``task``. A column that a task lacks is None in its rows.

    Raises ValueError if two tasks have a column of one name and different types.
    """
    from datasets import concatenate_datasets

    types: dict[str, tuple[str, Any]] = {}
    named = []
    for name, rows in parts.items():
        for column, kind in rows.features.items():
            first, known = types.setdefault(column, (name, kind))
            if known != kind and column != COLUMN:
                raise ValueError(
                    f"column {column!r} is {known} in task {first!r} and {kind} in task {name!r}: give both one type, "
                    "or one of them another name"
                )
        if COLUMN in rows.column_names:
            rows = rows.remove_columns(COLUMN)
        named.append(rows.add_column(COLUMN, [name] * len(rows)))
    return concatenate_datasets(named)
