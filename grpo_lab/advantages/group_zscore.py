"""Group-normalised reward: GRPO's advantage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.advantages.groups import DEVIATIONS, by_group, check_epsilon, check_std, group_average, scorable


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
