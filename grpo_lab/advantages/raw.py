"""Raw reward: REINFORCE without a baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.advantages.groups import by_group, scorable


@dataclass(frozen=True)
class Raw:
    """Â_i = r_i.

    Source: Williams 1992; CS336 lecture 17 ("naive" deltas). Unbiased, of high variance; all groups are live unless
    their reward is exactly 0.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        return scorable(by_group(rewards, group_size), rewards)
