"""Group-normalised reward: GRPO's advantage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.advantages.groups import by_group, check_epsilon, group_average, sample_std, scorable


@dataclass(frozen=True)
class GroupZScore:
    """Â_i = (r_i − mean r)/(std r + ε), mean and std over the group.

    Source: DeepSeekMath (arXiv 2402.03300, §4.1.2). ``epsilon`` is not given there; 1e-4 is TRL's. std has n − 1.
    """

    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        std = sample_std(grouped, dim=1, keepdim=True)
        return scorable(((grouped - group_average(grouped)) / (std + self.epsilon)), rewards)
