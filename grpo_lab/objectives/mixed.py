"""A mixture of tasks: the rows of one batch have the objectives of their tasks.

    loss = Σ_k λ_k · aggregate_k( rows of task k )

By default every task divides by the counts of *all* rows, so a task weighs as much as its share of the rows: two tasks
with one objective give the gradient of a single data set of all their rows. With ``own_denominators`` a task divides by
its own rows and tokens. It then weighs λ_k, however many rows it has.

Each task's objective sees the whole batch with the tokens of all other tasks masked. No row is moved and nothing is
read from the device. A row's loss depends on that row alone if it does so in its task's objective.

Source: ours. prime-rl (docs/algorithms.md, "Per-Env Algorithms") mixes algorithms by environment: each kind of loss
(``rl``, ``ce``, ``ref_kl``) is divided by its own tokens over all environments. verl has one algorithm, divides by all
rows, and only reports by ``data_source``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.batch import TASK, Denominators, TokenBatch
from grpo_lab.objectives.objective import Objective
from grpo_lab.objectives.ratios import log_ratio

TASK_ROWS, TASK_TOKENS = "grpo_lab.task_rows", "grpo_lab.task_tokens"
"""Names of two fields of the rows, float ``[B]``: the share of the row's task in the rows, and in the loss tokens, of
the generation batch over all ranks. The rows have them only if a task has denominators of its own."""


@dataclass(frozen=True)
class TaskObjective(Objective):
    """The objective of the rows whose number in ``batch.extras[TASK]`` is ``task``.

    Args:
        task: number of the task.
        loss_weight: λ, by which the task's loss is multiplied.
        own_denominators: divide by the task's own rows and tokens, not by those of all tasks.
    """

    task: int = 0
    loss_weight: float = 1.0
    own_denominators: bool = False

    @staticmethod
    def of(objective: Objective, name: str, **more: Any) -> TaskObjective:
        """Return ``objective`` as the objective of the task called ``name``; ``more`` are further fields of the
        result."""
        parts = {field.name: getattr(objective, field.name) for field in fields(Objective)}
        return TaskObjective(**{**parts, "name": f"{objective.name} of task {name}"}, **more)

    @property
    def marks(self) -> Mapping[str, int]:
        return {TASK: self.task}

    def rows(self, batch: TokenBatch) -> Tensor:
        """Return bool ``[B, 1]``: which rows are of this task. Raises ValueError if the rows carry no task."""
        if TASK not in batch.extras:
            raise ValueError(f"the rows of a mixture carry no task ({TASK!r}): the data set needs a column `task`")
        return batch.extras[TASK].reshape(-1, 1) == self.task

    def its_own(self, batch: TokenBatch) -> TokenBatch:
        """Return ``batch`` with the tokens of other tasks masked, and the ratio at this objective's level."""
        mask = batch.mask & self.rows(batch)
        ratio = log_ratio(self.ratio, batch.logps, batch.proximal_logps, mask)
        return replace(batch, mask=mask, log_ratio=ratio)

    def own_counts(self, batch: TokenBatch, denominators: Denominators) -> Denominators:
        """Return the denominators that this task divides by: with ``own_denominators`` those of all rows times the
        task's shares (0-dim tensors), else ``denominators`` itself. In a batch without a row of the task a share counts
        as 1; the loss there is 0."""
        if not self.own_denominators:
            return denominators
        mine = self.rows(batch).reshape(-1)

        def share(name: str) -> Tensor:
            found = torch.where(mine, batch.extras[name].reshape(-1), 0.0).amax()
            return torch.where(found > 0, found, 1.0)

        tokens = denominators.tokens * share(TASK_TOKENS)
        rows: Any = denominators.rows * share(TASK_ROWS)
        prompts: Any = denominators.prompts * share(TASK_ROWS)
        return replace(denominators, rows=rows, tokens=tokens, prompts=prompts)


class _OfEachTask:
    """Stand-in for the surrogate and aggregation of a mixture, which has one per task. Calling it raises TypeError."""

    __name__ = "by task"

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        raise TypeError("a mixture has a surrogate and an aggregation a task: ask those of `objective.each`")


_BY_TASK: Any = _OfEachTask()


@dataclass(frozen=True)
class MixedObjective(Objective):
    """The objectives of a mixture, one per task. All of them share one KL term and one entropy bonus.

    Args:
        tasks: the objectives of the tasks.

    Raises:
        ValueError: several tasks have parts that choose tokens under one name.
    """

    tasks: tuple[TaskObjective, ...] = ()

    def __post_init__(self) -> None:
        chosen = [part.selection for part in self.selecting]
        if len({*chosen}) < len(chosen):
            raise ValueError(
                f"several tasks have parts that choose tokens under one name ({chosen}), and a row carries one choice "
                "a name: give one of them another objective"
            )

    @staticmethod
    def of(tasks: Iterable[TaskObjective]) -> MixedObjective:
        """Return the mixture of these tasks. The KL term and the entropy bonus are taken from the first."""
        first, *others = tasks = tuple(tasks)
        return MixedObjective("mixture", _BY_TASK, _BY_TASK, kl=first.kl, entropy=first.entropy, tasks=(first, *others))

    @property
    def each(self) -> tuple[Objective, ...]:
        return self.tasks

    @property
    def selecting(self) -> tuple[Any, ...]:
        return tuple(part for task in self.tasks for part in task.selecting)

    @property
    def local_denominator(self) -> bool:
        return any(task.local_denominator for task in self.tasks)

    @property
    def whole_response(self) -> bool:
        return any(task.whole_response for task in self.tasks)

    def token_loss(self, batch: TokenBatch) -> Tensor:
        loss = torch.zeros((), dtype=batch.logps.dtype, device=batch.logps.device)
        for task in self.tasks:
            loss = loss + task.token_loss(task.its_own(batch))
        return loss

    def aggregated(self, loss: Tensor, batch: TokenBatch, denominators: Denominators) -> Tensor:
        return torch.stack(self.by_task(loss, batch, denominators)).sum()

    def by_task(self, loss: Tensor, batch: TokenBatch, denominators: Denominators) -> list[Tensor]:
        """Return what each task adds to the scalar loss, from the loss per token ``[B, T]``."""
        found = []
        for task in self.tasks:
            counts = task.own_counts(batch, denominators)
            found.append(task.loss_weight * task.aggregate(loss, batch.mask & task.rows(batch), counts))
        return found

    @torch.no_grad()
    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return what the surrogates of all tasks report: metric name → values, ``[B, T]`` or ``[B, 1]``. A metric that
        a task does not report is 0 on its rows."""
        found: dict[str, Tensor] = {}
        for task in self.tasks:
            rows = task.rows(batch)
            for name, values in task.diagnostics(task.its_own(batch)).items():
                values = torch.where(rows, values.to(batch.logps.dtype), 0.0)
                if name in found:
                    values = found[name] + values
                found[name] = values
        return found
