"""From TRL's gathered rewards to advantages: group rewards, checks, the table that every rank agrees on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

from grpo_lab.batch import RewardTable
from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.protocol import Group, scope_of, score_groups


@dataclass(frozen=True)
class Scored:
    """What ``_calculate_rewards`` saw, kept until TRL's method that called it returns (it has no seam for it).

    Args:
        table: rewards of all ranks.
        lengths: tokens that the policy made ``[N]`` (no tool output, as TRL counts them), all ranks.
        truncated: bool ``[N]``: ended by the length limit, not by an end token.
        rows: ``[N]`` row of the data set, −1 where it is not known (``sampler_seam``).
    """

    table: RewardTable
    lengths: Tensor
    truncated: Tensor
    rows: Tensor


class DeferredReward:
    """Stands in for a group reward while TRL calls rewards on local rows; the value comes after the gather."""

    def __init__(self, reward: Any) -> None:
        self.reward = reward
        self.__name__ = reward_name(reward)

    def __call__(self, prompts: list[Any], **_: Any) -> list[None]:
        return [None] * len(prompts)


def reward_name(reward: Any) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


def seam_for(reward: Any) -> Any:
    """What TRL should call in place of ``reward``: models and coroutines as they are, the rest checked or deferred."""
    if scope_of(reward) == "group":
        return DeferredReward(reward)
    return reward if isinstance(reward, nn.Module) or is_async_callable(reward) else CheckedReward(reward)


def fill_group_rewards(
    values: Tensor,
    names: tuple[str, ...],
    reward_funcs: list[Any],
    rows: list[dict[str, Any]],
    group_size: int,
    progress: tuple[int, int],
) -> Tensor:
    """The table with the columns of group rewards computed on whole groups; every rank computes the same.

    Args:
        values: ``[N, F]`` completion rewards, NaN in the columns of group rewards.
        rows: per row over all ranks: ``prompt``, ``text``, ``ids``, ``truncated``, ``columns``.
        progress: optimizer steps done, optimizer steps in all.
    """
    table = values.tolist()
    known = [i for i, reward in enumerate(reward_funcs) if scope_of(reward) == "completion"]
    values = values.clone()
    for start in range(0, len(rows), group_size):
        of_group = range(start, start + group_size)
        rewards = {names[i]: [None if table[r][i] != table[r][i] else table[r][i] for r in of_group] for i in known}
        group = _group([rows[r] for r in of_group], rewards, progress)
        for column, reward in enumerate(reward_funcs):
            if column not in known:
                scores = [float("nan") if score is None else score for score in score_groups(reward, [group])]
                values[start : start + group_size, column] = values.new_tensor(scores)
    return values


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
    )


def check_finite(values: Tensor, names: tuple[str, ...]) -> None:
    """An infinite reward poisons its whole group; NaN means unscorable and is allowed."""
    bad = values.isinf().any(dim=0)
    if bad.any():
        culprits = [name for name, flag in zip(names, bad.tolist(), strict=True) if flag]
        raise ValueError(
            f"reward function {culprits[0]!r} returned an infinite value; allowed are finite numbers, or None for a "
            "completion that cannot be scored (`reward_funcs`)"
        )


class CheckedReward:
    """Calls one reward function and checks what it returns, so that the error names it and the row.

    TRL turns ``float('inf')`` and ``float('nan')`` silently into advantages (NaN means ``None`` to it).
    """

    def __init__(self, reward: Any) -> None:
        self.reward = reward
        self.__name__ = reward_name(reward)

    def __call__(self, **inputs: Any) -> list[float | None]:
        values = self.reward(**inputs)
        expected = len(inputs["completions"])
        try:
            count = len(values)
        except TypeError:
            raise ValueError(
                f"reward function {self.__name__!r} returned {type(values).__name__}; it must return a list with one "
                f"number or None per completion ({expected}) (`reward_funcs`)"
            ) from None
        if count != expected:
            raise ValueError(
                f"reward function {self.__name__!r} returned {count} rewards for {expected} completions; it must return "
                "one number or None per completion (`reward_funcs`)"
            )
        for row, value in enumerate(values):
            if value is not None and not math.isfinite(float(value)):
                raise ValueError(
                    f"reward function {self.__name__!r} returned {value} for completion {row}; allowed are finite "
                    "numbers, or None for a completion that cannot be scored (`reward_funcs`)"
                )
        return list(values)


def gathered_rows(
    inputs: list[dict[str, Any]],
    prompts: list[Any],
    completions: list[Any],
    ids: list[list[int]],
    truncated: list[bool],
) -> list[dict[str, Any]]:
    """What group rewards read of each row, over all ranks in rank order (the sampler's order: groups are contiguous)."""
    skip = ("prompt", "completion", "completion_ids", "image", "images")
    rows = [
        {
            "prompt": prompt,
            "text": completion_text(completion),
            "ids": list(row_ids),
            "truncated": cut,
            "columns": {name: value for name, value in row.items() if name not in skip},
        }
        for row, prompt, completion, row_ids, cut in zip(inputs, prompts, completions, ids, truncated, strict=True)
    ]
    return list(gather_object(rows))


def tokens_made(generated: Any) -> list[int]:
    """How many tokens of each completion the policy itself made, from what TRL's ``_generate`` returns."""
    completion_ids, tool_mask = generated[1], generated[2]
    return [len(ids) for ids in completion_ids] if tool_mask is None else [sum(mask) for mask in tool_mask]


def truncated_rows(completion_ids: list[list[int]], end_ids: set[int]) -> list[bool]:
    """A completion that does not end in an end (or pad) token was cut by the length limit; an empty one was not."""
    return [bool(ids) and ids[-1] not in end_ids for ids in completion_ids]


def correctness_column(reward_funcs: list[Any]) -> int | None:
    """Which reward measures correctness: ``measures_correctness = True``, or named accuracy_reward."""
    for column, reward in enumerate(reward_funcs):
        inner = getattr(reward, "reward", reward)
        if getattr(inner, "measures_correctness", False) or reward_name(inner) in ("accuracy_reward", "AccuracyReward"):
            return column
    return None


def correctness(table: RewardTable, reward_funcs: list[Any]) -> Tensor | None:
    """The column of the reward that measures correctness ``[N]``, NaN where it could not be scored."""
    column = correctness_column(reward_funcs)
    return None if column is None else table.values[:, column]


def dead_groups(total: Tensor, group_size: int) -> Tensor:
    """bool ``[groups]``: all scorable rewards of the group are equal."""
    grouped = total.view(-1, group_size)
    return grouped.nan_to_num(nan=-torch.inf).amax(1) <= grouped.nan_to_num(nan=torch.inf).amin(1)
