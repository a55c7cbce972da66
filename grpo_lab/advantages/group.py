"""Parts that rules of a group share: the check of the rewards, NaN-aware mean and standard deviation, and the test for
dead groups, whose rewards are all equal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def by_group(rewards: Tensor, group_size: int) -> Tensor:
    """Check rewards ``[N]`` and return them by group, ``[N/G, G]``, in float64.

    Advantages are differences of nearly equal numbers: in float32 a reward of 1 keeps only three digits of a KL penalty
    of 1e-4. Raises ValueError for rewards that are not ``[N]`` of a float type, not whole groups, or infinite.
    """
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be a float tensor [N], got {tuple(rewards.shape)} {rewards.dtype}")
    if group_size < 1 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards are not whole groups of num_generations={group_size}")
    if rewards.isinf().any():
        raise ValueError("a reward is infinite; a reward function must return finite numbers, or None for unscorable")
    return rewards.reshape(rewards.numel() // group_size, group_size).double()


def group_average(grouped: Tensor) -> Tensor:
    """Return the mean of each group, ``[N/G, 1]``, leaving out NaN. A group of equal rewards gets *exactly* that
    reward.

    A float mean would miss it: ``mean([0.1] * 6)`` is not exactly 0.1. The advantages of such a group would then not be
    exactly 0, as the formula says, and its rows could not be left out of the update.
    """
    first = grouped.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    return torch.where(is_dead(grouped).unsqueeze(1), first, grouped.nanmean(dim=1, keepdim=True))


def is_dead(grouped: Tensor) -> Tensor:
    """Return bool ``[N/G]``: True if all rewards of the group that are not NaN are equal, or all are NaN. Rules that
    subtract the mean give such a group 0."""
    groups, size = grouped.shape
    number = torch.arange(groups, device=grouped.device).repeat_interleave(size)
    return has_equal(grouped.reshape(-1), number, groups)


def has_equal(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return bool ``[groups]``: True if all values of the group that are not NaN are equal, or there are none.

    Args:
        values: float ``[n]``.
        group: long ``[n]``, the number of each value's group.
        groups: number of groups.
    """
    high = values.new_full((groups,), -torch.inf).scatter_reduce(0, group, values.nan_to_num(nan=-torch.inf), "amax")
    low = values.new_full((groups,), torch.inf).scatter_reduce(0, group, values.nan_to_num(nan=torch.inf), "amin")
    return high <= low


#: Number that verl's rules, and the code that grew out of verl, add to a divisor.
VERLS_EPSILON = 1e-6


#: Setting ``std`` of a rule → number that is subtracted from n in the denominator.
DEVIATIONS = {"population": 0, "sample": 1}


def deviation(values: Tensor, dim: int, keepdim: bool = False, std: str = "sample") -> Tensor:
    """Compute the standard deviation along ``dim``, leaving out NaN.

    ``sample`` divides by n − 1, as TRL's and the papers' code does, and gives 0 for a single value; ``population``
    divides by n. Where all values are NaN it is 0.
    """
    count = (~values.isnan()).sum(dim=dim, keepdim=True) - DEVIATIONS[std]
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    found = (squares / count.clamp(min=1)).sqrt()
    if keepdim:
        return found
    return found.squeeze(dim)


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError unless the knob ``epsilon`` is a finite number ≥ 0."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"`advantage.epsilon` is {epsilon}; it must be a finite number ≥ 0")


@dataclass(frozen=True)
class StdNormalized:
    """Knobs of the rules that divide by a standard deviation.

    Args:
        epsilon: added to the standard deviation, ≥ 0.
        std: ``sample`` (n − 1 in the denominator) or ``population`` (n).
    """

    epsilon: float = 1e-4
    std: str = "sample"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        if self.std not in DEVIATIONS:
            allowed = f"{list(DEVIATIONS)} (n or n − 1 in the denominator)"
            raise ValueError(f"`advantage.std` is {self.std!r}; it must be one of {allowed}")


def scorable(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Flatten advantages to ``[N]`` in the type of ``rewards``. Rows that could not be scored (NaN) get 0."""
    return advantages.reshape(-1).nan_to_num(nan=0.0).to(rewards.dtype)
