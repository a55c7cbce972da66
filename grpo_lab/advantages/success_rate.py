"""Rules of success rates: MaxRL, which approaches maximum likelihood, and pass@k, where one of k completions must be
right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.group import VERLS_EPSILON, by_group, check_epsilon, group_average, scorable


@dataclass(frozen=True)
class MaxRL:
    """Divide the distance from the group's mean by that mean: Â_i = (r_i − μ)/(μ + ε), μ the mean of the group's
    rewards; 0 where no completion earned anything (μ = 0).

    A question that is solved with probability p weighs 1/p, as in the gradient of log p; GRPO gives it 1/√(p(1 − p)),
    RLOO 1. log p is a series whose k-th term is pass@k divided by k (up to a constant). With N completions of rewards 0
    and 1, the expected gradient is that of its first N − 1 terms. (The paper's N holds if the mean score is subtracted
    also where no completion was right.)

    Source: MaxRL (arXiv 2602.02710, algorithm 1), for rewards of 0 and 1. ε is not in the paper; 1e-6 is that of the
    authors' code (tajwarfahim/maxrl). How we differ: a group of one scorable completion gets 0 (theirs divides its
    reward by ε).

    Args:
        epsilon: added to the mean, ≥ 0.
    """

    takes_penalty: ClassVar[bool] = False
    epsilon: float = VERLS_EPSILON

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        """Return advantages ``[N]``. Raises ValueError for a negative reward: the mean is then no success rate, and
        might be negative, which would turn all signs of its group."""
        grouped = by_group(rewards, group_size)
        if (grouped < 0).any():
            lowest = grouped.nan_to_num(nan=0.0).min().item()
            raise ValueError(
                f"a completion's reward is {lowest:g}; `advantage: maxrl` divides by the mean of a group, which must "
                "be a success rate: use rewards ≥ 0, or another rule (`advantage`)"
            )
        mean = group_average(grouped)
        return scorable((grouped - mean) / (mean + self.epsilon), rewards)


@dataclass(frozen=True)
class PassAtK:
    """The advantage of a completion under the reward pass@k, averaged over all k-subsets of its group:

        R̄ = 1 − C(m, k)/C(n, k)      σ = √(R̄(1 − R̄))      n completions of the group, m of them failures
        Â = (1 − R̄)/(σ + ε)                                    for a success
        Â = (1 − R̄ − C(m − 1, k − 1)/C(n − 1, k − 1))/(σ + ε)  for a failure

    A completion is a success if its reward (the weighted sum) is at least ``success``. With fewer than k failures every
    subset holds a success, and all advantages are exactly 0: easy questions are left alone.

    Source: "Pass@k Training" (arXiv 2508.10751, analytical derivation; RUCAIBox/Passk_Training, whose ε of 1e-6 this
    is). The authors try several k; the default is ours. How we differ: a success is a reward of at least a threshold,
    not of exactly 1; unscorable completions count neither in n nor in m.

    Args:
        k: completions that are drawn together, ≥ 1. In a group with k or fewer scorable completions the only subset is
            the group itself, and all get 0. So a run needs ``num_generations`` > k.
        success: smallest reward of a success.
        epsilon: added to σ, ≥ 0.
    """

    takes_penalty: ClassVar[bool] = False
    k: int = 4
    success: float = 1.0
    epsilon: float = VERLS_EPSILON

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        if self.k < 1:
            raise ValueError(f"`advantage.k` is {self.k}; it must be a whole number ≥ 1")

    @property
    def least_group(self) -> int:
        """The smallest group in which a completion gets another advantage than 0."""
        return self.k + 1

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        right = grouped >= self.success
        scored = (~grouped.isnan()).sum(dim=1, keepdim=True).double()
        failures = scored - right.sum(dim=1, keepdim=True)
        # C(m − 1, k − 1)/C(n − 1, k − 1): the other k − 1 of a failure's subset are failures, too
        others_fail = torch.ones_like(scored)
        for drawn in range(1, self.k):
            others_fail = others_fail * (failures - drawn) / (scored - drawn).clamp(min=1)
        others_fail = others_fail.where(failures >= self.k, 0.0)
        all_fail = others_fail * failures / scored.clamp(min=1)
        spread = (all_fail * (1 - all_fail)).sqrt() + self.epsilon
        advantages = torch.where(right, all_fail, all_fail - others_fail) / spread
        taught = ~grouped.isnan() & (all_fail > 0) & (all_fail < 1)
        return scorable(advantages.masked_fill(~taught, 0.0), rewards)
