"""Group mean, batch standard deviation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.advantages.groups import DEVIATIONS, by_group, check_epsilon, check_std, group_average, scorable


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
