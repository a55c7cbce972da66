"""Leave-one-out baseline: RLOO."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.advantages.groups import by_group, group_average, scorable


@dataclass(frozen=True)
class LeaveOneOut:
    """Â_i = r_i − mean(r_j, j ≠ i) = (r_i − mean r) · n/(n − 1), n scorable completions of the group.

    Source: RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740, eq. 8). Unbiased. A group with a single scorable
    completion has no baseline and gets 0. The second form is computed: it loses no digits to a large common offset.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)
        return scorable(((grouped - group_average(grouped)) * count / (count - 1).clamp(min=1)), rewards)
