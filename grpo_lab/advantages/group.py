"""Group mean as baseline: Dr.GRPO's advantage.

Raw reward: REINFORCE without a baseline.

Only the best of the group is reinforced.

Leave-one-out baseline: RLOO.

Group-normalised reward: GRPO's advantage.

Group mean, batch standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.advantages.groups import DEVIATIONS, by_group, check_epsilon, check_std, group_average, scorable


@dataclass(frozen=True)
class GroupMean:
    """Â_i = r_i − mean(r of its group).

    Source: Dr.GRPO (arXiv 2503.20783, §3.2). No division by the standard deviation, which would over-weight questions
    that are almost always or almost never solved.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        return scorable((grouped - group_average(grouped)), rewards)


@dataclass(frozen=True)
class Raw:
    """Â_i = r_i.

    Source: Williams 1992; CS336 lecture 17 ("naive" deltas). Unbiased, of high variance; all groups are live unless
    their reward is exactly 0.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        return scorable(by_group(rewards, group_size), rewards)


@dataclass(frozen=True)
class GroupMax:
    """Â_i = r_i if r_i is the group's maximum, else 0 (ties are all kept).

    Source: CS336 lecture 17 ("max" deltas): best-of-n imitation. Note that a group of equal rewards is *not* dead here.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        best = grouped.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
        return scorable(torch.where(grouped == best, grouped, torch.zeros_like(grouped)), rewards)


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


@dataclass(frozen=True)
class GroupZScore:
    """Â_i = (r_i − mean r)/(std r + ε), mean and std over the group.

    Source: DeepSeekMath (arXiv 2402.03300, §4.1.2). ``epsilon`` is not given there; 1e-4 is TRL's.

    Args:
        epsilon: added to the standard deviation, ≥ 0.
        std: ``sample`` (n − 1 in the denominator, as TRL and the papers' code) or ``population`` (n).
    """

    epsilon: float = 1e-4
    std: str = "sample"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_std(self.std)

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        std = DEVIATIONS[self.std](grouped, 1, True)
        return scorable(((grouped - group_average(grouped)) / (std + self.epsilon)), rewards)


@dataclass(frozen=True)
class BatchZScore:
    """Â_i = (r_i − mean of its group)/(std of the whole batch + ε).

    Source: "Tricks or Traps" (arXiv 2508.08221, §4.1, group-level mean with batch-level std); TRL's
    ``scale_rewards="batch"``. Keeps GRPO's scale without its per-question weights.

    Args:
        epsilon: added to the standard deviation, ≥ 0.
        std: ``sample`` (n − 1 in the denominator, as TRL) or ``population`` (n).
    """

    epsilon: float = 1e-4
    std: str = "sample"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_std(self.std)

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        std = DEVIATIONS[self.std](grouped.reshape(-1), 0, False)
        return scorable(((grouped - group_average(grouped)) / (std + self.epsilon)), rewards)
