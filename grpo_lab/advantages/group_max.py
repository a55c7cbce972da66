"""Only the best of the group is reinforced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.advantages.groups import by_group, scorable


@dataclass(frozen=True)
class GroupMax:
    """Â_i = r_i if r_i is the group's maximum, else 0 (ties are all kept).

    Source: CS336 lecture 17 ("max" deltas): best-of-n imitation. Note that a group of equal rewards is *not* dead here.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        best = grouped.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
        return scorable(torch.where(grouped == best, grouped, torch.zeros_like(grouped)), rewards)
