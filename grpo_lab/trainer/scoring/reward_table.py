"""How TRL calls rewards: each one checked, those of whole groups after the gather, steps kept aside, weights by
schedule.

A schedule (``reward_schedules``) is a function of the optimizer step, logged as ``reward_weights/<name>``. It keeps no
state: a resumed run has at step t the weight that the uninterrupted run had there.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

from grpo_lab.batch import RewardTable
from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.protocol import Group, scope_of, score_groups
from grpo_lab.rewards.schedules import Schedule
from grpo_lab.settings import one_of
from grpo_lab.trainer.ports import Faults
from grpo_lab.trainer.ranks import at
from grpo_lab.trainer.scoring.steps import StepCalled
from grpo_lab.trainer.trl_bridge.rewards import correctness_column
from grpo_lab.verifiers.verdict import checked_scores

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


class DeferredReward:
    """Stands in for a group reward while TRL calls rewards on local rows; the value comes after the gather."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, prompts: list[Any], **_: Any) -> list[None]:
        return [None] * len(prompts)


def as_trl_calls_it(reward: Any, name: str, keep_infinite: bool = False) -> Any:
    """What TRL should call in place of ``reward``: models as they are, the rest checked or deferred.

    ``keep_infinite``: an infinite value is handed on, to be found in the gathered table (``without_infinite``).
    """
    if scope_of(reward) == "group":
        return DeferredReward(name)
    if scope_of(reward) == "step":
        return StepCalled(reward, name, keep_infinite)
    if isinstance(reward, nn.Module):
        return reward
    kind = CheckedCoroutine if is_async_callable(reward) else CheckedReward
    return kind(reward, name, keep_infinite)


def nan_counts(seams: list[Any], values: Tensor, accelerator: Any) -> Tensor:
    """How many NaN each reward returned, over all ranks, long ``[F]``; a model's are all NaN of its column."""
    local = torch.tensor([[getattr(seam, "not_numbers", 0) for seam in seams]], device=values.device)
    counts: Tensor = accelerator.gather(local).sum(0)
    models = torch.tensor([isinstance(seam, nn.Module) for seam in seams], device=values.device)
    return torch.where(models, values.isnan().sum(0), counts)


def fill_group_rewards(
    values: Tensor,
    names: tuple[str, ...],
    reward_funcs: list[Any],
    rows: list[dict[str, Any]],
    group_size: int,
    progress: tuple[int, int],
    keep_infinite: bool = False,
) -> tuple[Tensor, Tensor]:
    """The table with the columns of group rewards computed on whole groups, and how many NaN ``[F]`` they gave.

    Every rank computes the same.

    Args:
        values: ``[N, F]`` completion rewards, NaN in the columns of group rewards.
        rows: per row over all ranks: what ``gathered_rows`` gives.
        progress: optimizer steps done, optimizer steps in all.
        keep_infinite: as in ``as_trl_calls_it``.
    """
    table = values.tolist()
    known = [i for i, reward in enumerate(reward_funcs) if scope_of(reward) != "group"]
    values, not_numbers = values.clone(), torch.zeros_like(values[0], dtype=torch.long)
    for start in range(0, len(rows), group_size):
        of_group = range(start, start + group_size)
        rewards = {names[i]: [None if table[r][i] != table[r][i] else table[r][i] for r in of_group] for i in known}
        group = _group([rows[r] for r in of_group], rewards, progress)
        for column, reward in enumerate(reward_funcs):
            if column not in known:
                scores = score_groups(reward, [group], keep_infinite)
                not_numbers[column] += sum(score != score for score in scores)
                filled = [float("nan") if score is None else score for score in scores]
                values[start : start + group_size, column] = values.new_tensor(filled)
    return values, not_numbers


def _group(rows: list[dict[str, Any]], rewards: dict[str, list[float | None]], progress: tuple[int, int]) -> Group:
    ids = [row["ids"] for row in rows]
    return Group(
        prompt=rows[0]["prompt"],
        completions=[row["text"] for row in rows],
        completion_ids=ids,
        lengths=[len(row) for row in ids],
        truncated=[row["truncated"] for row in rows],
        rewards=rewards,
        columns={name: [row["columns"].get(name) for row in rows] for name in rows[0]["columns"]},
        step=progress[0],
        max_steps=progress[1],
        messages=[row["completion"] for row in rows],
        environments=None if rows[0]["environment"] is None else [row["environment"] for row in rows],
    )


def without_infinite(values: Tensor, names: tuple[str, ...], faults: Faults | None, home: str) -> Tensor:
    """``values`` ``[N, F]`` with infinite ones as NaN (cannot be scored), and the batch marked as bad.

    Args:
        values: the same on every rank.
        home: what returned them, for the sentence: ``"reward function {}"``.

    Raises:
        ValueError: without a guard. An infinite reward poisons its whole group.
    """
    infinite = values.isinf()
    for column in infinite.any(dim=0).nonzero().flatten().tolist():
        rows = infinite[:, column].nonzero().flatten().tolist()
        more = f" and {len(rows) - 1} more" if rows[1:] else ""
        seen = f"{values[rows[0], column].item()} for completion {rows[0]}{more} of {values.size(0)}"
        said = f"{home.format(repr(names[column]))} returned {seen}"
        if faults is None:
            raise ValueError(
                f"{said}; allowed are finite numbers, or None (NaN) for a completion that cannot be scored "
                "(`reward_funcs`)"
            )
        faults.infinite.update({(row, column): values[row, column].item() for row in rows})
        faults.found("reward", said)
    return values.masked_fill(infinite, float("nan")) if bool(infinite.any()) else values


class CheckedReward:
    """Calls one reward function and checks what it returns, so that the error names it and the row.

    TRL turns ``float('inf')`` silently into advantages. NaN means ``None``, as it does to TRL; ``not_numbers`` counts
    them.
    """

    def __init__(self, reward: Any, name: str, keep_infinite: bool = False) -> None:
        self.reward, self.keep_infinite = reward, keep_infinite
        self.__name__ = name
        self.not_numbers = 0

    def __call__(self, **inputs: Any) -> list[float | None]:
        return self.checked(self.reward(**inputs), len(inputs["completions"]))

    def checked(self, values: Any, expected: int) -> list[float | None]:
        """One number or None per completion, or ``ValueError``."""
        who = f"reward function {self.__name__!r} (`reward_funcs`)"
        scores = checked_scores(values, expected, who, infinite=self.keep_infinite)
        self.not_numbers += sum(score != score for score in scores)
        return [None if score != score else score for score in scores]


class CheckedCoroutine(CheckedReward):
    """The same for an asynchronous reward."""

    async def __call__(self, **inputs: Any) -> list[float | None]:  # type: ignore[override]
        return self.checked(await self.reward(**inputs), len(inputs["completions"]))


def gathered_rows(
    trainer: Any,
    inputs: list[dict[str, Any]],
    prompts: list[Any],
    completions: list[Any],
    ids: list[list[int]],
    truncated: list[bool],
) -> list[dict[str, Any]]:
    """What group rewards read of each row, over all ranks in rank order (the sampler's order: groups are contiguous).

    Per row: ``prompt``, ``text``, ``completion`` (as TRL has it), ``ids``, ``truncated``, ``columns``, ``environment``.
    """
    skip = ("prompt", "completion", "completion_ids", "image", "images")
    rows = [
        {
            "prompt": prompt,
            "text": completion_text(completion),
            "completion": completion,
            "ids": list(row_ids),
            "truncated": cut,
            "columns": {name: value for name, value in row.items() if name not in skip},
            "environment": environment,
        }
        for row, prompt, completion, row_ids, cut, environment in zip(
            inputs, prompts, completions, ids, truncated, environments_for_groups(trainer, len(prompts)), strict=True
        )
    ]
    with at("rows for group rewards"):
        return list(gather_object(rows))


def tokens_made(generated: Any) -> list[int]:
    """How many tokens of each completion the policy itself made, from what TRL's ``_generate`` returns."""
    completion_ids, tool_mask = generated[1], generated[2]
    return [len(ids) for ids in completion_ids] if tool_mask is None else [sum(mask) for mask in tool_mask]


def environments_for_groups(trainer: Any, rows: int) -> list[Any]:
    """This rank's environments where a group reward reads them, else None for each row.

    Raises:
        ValueError: a group may lie on several ranks, and an environment cannot be sent from one to another.
    """
    readers = [reward for reward in trainer.reward_funcs if getattr(reward, "reads_environments", False)]
    if trainer.environments is None or not readers:
        return [None] * rows
    if trainer.accelerator.num_processes > 1:
        try:
            pickle.dumps(trainer.environments)
        except Exception as error:  # whatever an object's own pickling raises
            raise ValueError(
                f"group reward {readers[0].name!r} reads environments, and with several processes they are sent to "
                "the ranks "
                f"that share a group, but {type(trainer.environments[0]).__name__} cannot be pickled ({error}): give "
                "it a "
                "`__getstate__` with what the reward reads, or `get_reward`"
            ) from error
    return list(trainer.environments)


def truncated_rows(completion_ids: list[list[int]], end_ids: set[int]) -> list[bool]:
    """A completion that does not end in an end (or pad) token was cut by the length limit; an empty one was not."""
    return [len(ids) > 0 and int(ids[-1]) not in end_ids for ids in completion_ids]


def correctness(table: RewardTable, reward_funcs: list[Any]) -> Tensor | None:
    """The column of the reward that measures correctness ``[N]``, NaN where it could not be scored."""
    column = correctness_column(reward_funcs)
    return None if column is None else table.values[:, column]


class WeightSchedules:
    """Sets the trainer's ``reward_weights`` before every generation batch, and logs what is in force."""

    def __init__(self, trainer: StepPort, schedules: Mapping[str, Schedule]) -> None:
        names = list(trainer.reward_func_names)
        for name in schedules:
            if name not in names:
                raise ValueError(f"`reward_schedules` names {name!r}, which no reward has{one_of(name, names)}")
            if names.count(name) > 1:
                raise ValueError(f"`reward_schedules` names {name!r}, which {names.count(name)} rewards share: {names}")
            _refuse_double(trainer, names.index(name), name)
        self.trainer = trainer
        self._columns = {names.index(name): schedule for name, schedule in schedules.items()}
        self._own = {
            column: reward.weight_at
            for column, reward in enumerate(trainer.reward_funcs)
            if hasattr(reward, "weight_at")
        }

    def apply(self) -> None:
        """The weights of the batch that is about to be generated; ``step`` = optimizer steps done."""
        trainer, step = self.trainer, self.trainer.state.global_step
        in_force = {column: schedule(step) for column, schedule in self._columns.items()}
        for column, weight in in_force.items():
            trainer.reward_weights[column] = weight
        fixed = trainer.reward_weights.tolist()
        logged = in_force | {column: fixed[column] * weight_at(step) for column, weight_at in self._own.items()}
        book = trainer.recorder.book("train" if trainer.model.training else "eval")
        for column, weight in logged.items():
            book.add_alike(f"reward_weights/{trainer.reward_func_names[column]}", torch.tensor([weight]), 1)


def _refuse_double(trainer: StepPort, column: int, name: str) -> None:
    """One weight, one place that says it."""
    if hasattr(trainer.reward_funcs[column], "weight_at"):
        raise ValueError(
            f"`reward_schedules.{name}` is set, but that reward carries a weight and a warm-up of its own: set them "
            "there "
            f"({type(trainer.reward_funcs[column]).__name__}(weight=…, warmup_steps=…))"
        )
    if trainer.args.reward_weights is not None and trainer.args.reward_weights[column] != 1.0:
        raise ValueError(
            f"`reward_weights` gives {name!r} the weight {trainer.args.reward_weights[column]}, and `reward_schedules` "
            "gives it a schedule: two names for one number; set one"
        )
