"""A mixture of tasks: the groups of each task get advantages by their own rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.whiten import level_of, takes_penalty
from grpo_lab.batch import RewardTable


@dataclass(frozen=True)
class MixedAdvantage:
    """Apply to the rows of each task the task's own rule. Tasks that share a rule are one table.

    So a rule over the whole batch (``batch_zscore``) sees the rows of its tasks, and of no other.

    Args:
        rules: pairs of a rule of level ``row`` or ``table`` and the numbers of its tasks.
    """

    rules: tuple[tuple[Any, tuple[int, ...]], ...]
    level: ClassVar[str] = "table"

    @property
    def takes_penalty(self) -> bool:
        """Return whether every rule takes a KL penalty in the reward (``whiten.takes_penalty``)."""
        return all(takes_penalty(rule) for rule, _ in self.rules)

    @property
    def least_group(self) -> int:
        """The smallest group in which every rule gives some completion another advantage than 0."""
        return max((getattr(rule, "least_group", 0) for rule, _ in self.rules), default=0)

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[N]``. Raises ValueError if the table does not say the rows' tasks."""
        if table.tasks is None:
            raise ValueError("the reward table of a mixture has no `tasks`: the data set needs a column `task`")
        advantages = torch.zeros(table.values.size(0), dtype=table.values.dtype, device=table.values.device)
        for rule, numbers in self.rules:
            index = torch.isin(table.tasks, torch.tensor(numbers, device=table.tasks.device)).nonzero().flatten()
            if index.numel() == 0:
                continue
            own = table.picked(index)
            found = rule(own.total, own.group_size) if level_of(rule) == "row" else rule(own)
            advantages[index.to(advantages.device)] = found.to(advantages)
        return advantages
