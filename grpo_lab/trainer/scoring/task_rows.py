"""The tasks of a mixture in a generation batch: which row is of which, what the rows carry to the loss, and metrics by
task (``tasks/NAME/…``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_lab.batch import RewardTable
from grpo_lab.rewards.for_task import COLUMN
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import Carried, loss_mask
from grpo_lab.trainer.scoring.carriers import Rewarded, local_rows


def task_numbers(trainer: StepPort, inputs: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the number of each row's task, its place in ``tasks``; -1 for each row if ``tasks`` is not set."""
    numbers = {name: number for number, name in enumerate(trainer.lab_settings.tasks)}
    if not numbers:
        return [-1 for _ in inputs]
    return [numbers[row[COLUMN]] for row in inputs]


def mark_tasks(trainer: StepPort, table: RewardTable, batch: dict[str, Any]) -> None:
    """Write the task of each of this rank's rows into ``batch`` (``Carried.task``). If a task has denominators of its
    own (``denominators: own``), also write the task's shares of all rows and of all loss tokens, from which the loss
    computes them. A collective."""
    tasks = table.tasks
    if tasks is None:
        return
    carried = Carried(batch)
    device = batch["prompt_ids"].device
    mine = local_rows(trainer, batch)
    tasks = tasks.to(device)
    carried.task = tasks[mine]
    if all(task.denominators == "all" for task in trainer.lab_settings.tasks.values()):
        return
    with named_place("loss tokens by task"):
        tokens = trainer.accelerator.gather(loss_mask(batch).sum(1)).double()
    carried.task_rows = _shares(tasks, torch.ones_like(tokens))[mine]
    carried.task_tokens = _shares(tasks, tokens)[mine]


def _shares(tasks: Tensor, amounts: Tensor) -> Tensor:
    """Return for each row, float32 ``[N]``, the fraction of the sum of ``amounts`` ``[N]`` that belongs to the rows of
    the same task."""
    of_task = torch.zeros(int(tasks.max()) + 1, dtype=amounts.dtype, device=amounts.device)
    of_task = of_task.index_add(0, tasks, amounts)
    return (of_task / of_task.sum().clamp(min=1))[tasks].float()


def record_by_task(trainer: StepPort, rewarded: Rewarded, dead: Tensor) -> None:
    """Log prompts, rewards, dead groups, lengths and truncated completions by task (``tasks/NAME/…``). ``dead``: bool
    ``[groups]``, whether all rewards of a group are equal."""
    table = rewarded.table
    if table.tasks is None:
        return
    book = trainer.recorder.book()
    total = table.total
    for number, name in enumerate(trainer.lab_settings.tasks):
        rows = table.tasks == number
        groups = rows.view(-1, table.group_size)[:, 0]
        scored = rows.to(total.device) & ~total.isnan()
        book.add_alike(f"tasks/{name}/prompt_share", groups.sum(), groups.numel())
        book.add_alike(f"tasks/{name}/reward", total[scored].sum(), scored.sum())
        book.add_alike(f"tasks/{name}/dead_share", dead[groups.to(dead.device)].sum(), groups.sum())
        book.add_alike(f"tasks/{name}/mean_length", rewarded.lengths[rows].sum(), rows.sum())
        book.add_alike(f"tasks/{name}/truncated_share", rewarded.truncated[rows].sum(), rows.sum())
