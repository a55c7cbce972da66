"""Rules that give each completion one advantage: raw, group mean (Dr.GRPO), best of the group, by how much it is best,
leave-one-out (RLOO), z-score (GRPO), batch z-score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.advantages.group import VERLS_EPSILON, StdNormalized, by_group, deviation, group_average, scorable


@dataclass(frozen=True)
class GroupMean:
    """Subtract the mean of the group: Â_i = r_i − mean(r of its group).

    Source: Dr.GRPO (arXiv 2503.20783, §3.2). It does not divide by the standard deviation, which would over-weight
    questions that are almost always or almost never solved.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        return scorable(grouped - group_average(grouped), rewards)


@dataclass(frozen=True)
class Raw:
    """Use the reward itself, without a baseline: Â_i = r_i.

    Source: Williams 1992; CS336 lecture 17 ("naive" deltas). The gradient is unbiased, of high variance. A row adds
    nothing to it only where its reward is exactly 0, or NaN.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        return scorable(by_group(rewards, group_size), rewards)


@dataclass(frozen=True)
class GroupMax:
    """Keep only the best reward of a group: Â_i = r_i if r_i is the group's maximum (ties are all kept), else 0.

    Source: CS336 lecture 17 ("max" deltas): best-of-n imitation. A group of equal rewards is *not* dead here.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        best = grouped.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
        return scorable(torch.where(grouped == best, grouped, torch.zeros_like(grouped)), rewards)


@dataclass(frozen=True)
class PasskMargin(StdNormalized):
    """Give the best completion of a group its margin over the second best, Â = r_best − r_second, and all others 0. If
    several are best, all get 0.

    This is each completion's contribution to the best reward of its group: what the maximum would lose without it.

    Source: "Optimizing Language Models for Inference Time Objectives" (arXiv 2503.19595: pass@k with k = G, leave one
    out), as verl's ``grpo_passk``. verl divides by the group's standard deviation + 1e-6 by default (``over_std``); the
    leave-one-out estimate does not. How we differ: a group with one scorable completion gets 0 (verl refuses it).

    Args:
        over_std: divide by the group's standard deviation + ``epsilon``.
        epsilon: added to the standard deviation, ≥ 0.
        std: ``sample`` (n − 1 in the denominator, as verl) or ``population`` (n).
    """

    epsilon: float = VERLS_EPSILON
    over_std: bool = False

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        known = torch.nn.functional.pad(grouped.nan_to_num(nan=-torch.inf), (0, 1), value=-torch.inf)
        best, second = known.topk(2, dim=1).values.split(1, dim=1)
        margin = torch.where(second > -torch.inf, best - second, 0.0)
        if self.over_std:
            margin = margin / (deviation(grouped, 1, True, self.std) + self.epsilon)
        return scorable(torch.where(grouped == best, margin, torch.zeros_like(grouped)), rewards)


@dataclass(frozen=True)
class LeaveOneOut:
    """Subtract the mean of the other completions of the group: Â_i = r_i − mean(r_j, j ≠ i) = (r_i − mean r) · n/(n −
    1), where n completions of the group could be scored.

    Source: RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740, eq. 8). Unbiased. A group with a single scorable
    completion has no baseline and gets 0. The second form is computed: it loses no digits to a large common offset.
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)
        return scorable((grouped - group_average(grouped)) * count / (count - 1).clamp(min=1), rewards)


@dataclass(frozen=True)
class GroupZScore(StdNormalized):
    """Standardise rewards within their group: Â_i = (r_i − mean r)/(std r + ε).

    Source: DeepSeekMath (arXiv 2402.03300, §4.1.2), which gives no ε; 1e-4 is TRL's.

    Args:
        epsilon: added to the standard deviation, ≥ 0.
        std: ``sample`` (n − 1 in the denominator, as TRL and the papers' code) or ``population`` (n).
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        std = deviation(grouped, 1, True, self.std)
        return scorable((grouped - group_average(grouped)) / (std + self.epsilon), rewards)


@dataclass(frozen=True)
class BatchZScore(GroupZScore):
    """Subtract the group's mean, and divide by the standard deviation of all rewards: Â_i = (r_i − mean of its
    group)/(std of the whole batch + ε).

    Source: "Tricks or Traps" (arXiv 2508.08221, §4.1, group-level mean with batch-level std); TRL's
    ``scale_rewards="batch"``. It keeps GRPO's scale without its per-question weights.

    Args:
        epsilon: added to the standard deviation, ≥ 0.
        std: ``sample`` (n − 1 in the denominator, as TRL) or ``population`` (n).
    """

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = by_group(rewards, group_size)
        std = deviation(grouped.reshape(-1), 0, False, self.std)
        return scorable((grouped - group_average(grouped)) / (std + self.epsilon), rewards)
