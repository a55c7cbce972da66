"""Group mean as baseline: Dr.GRPO's advantage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.advantages.groups import by_group, group_average, scorable


@dataclass(frozen=True)
class GroupMean:
    """Â_i = r_i − mean(r of its group).

    Source: Dr.GRPO (arXiv 2503.20783, §3.2). No division by the standard deviation, which would over-weight questions
    that are almost always or almost never solved.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        return scorable((grouped - group_average(grouped)), rewards)
