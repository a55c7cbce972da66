"""Arithmetic on groups that every rule shares: door check, NaN-aware mean and standard deviation, dead groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def by_group(rewards: Tensor, group_size: int) -> Tensor:
    """``[N] -> [N/G, G]`` in float64, after checking the door.

    Advantages are differences of nearly equal numbers, divided by a small spread: in float32 rewards of 1 that differ
    by a KL penalty of 1e-4 keep three digits of it.
    """
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be a float tensor [N], got {tuple(rewards.shape)} {rewards.dtype}")
    if group_size < 1 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards are not whole groups of num_generations={group_size}")
    if rewards.isinf().any():
        raise ValueError("a reward is infinite; a reward function must return finite numbers, or None for unscorable")
    return rewards.reshape(rewards.numel() // group_size, group_size).double()


def group_average(grouped: Tensor) -> Tensor:
    """NaN-aware mean of each group, ``[N/G, 1]``. A dead group's mean is its common reward *exactly*.

    ``mean([0.1] * 6)`` rounds to something else than 0.1; the group would then get advantages of 1e-9 where the formula
    says 0, and its rows could not be skipped.
    """
    first = grouped.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    return torch.where(is_dead(grouped).unsqueeze(1), first, grouped.nanmean(dim=1, keepdim=True))


def is_dead(grouped: Tensor) -> Tensor:
    """bool ``[N/G]``: all scorable rewards of the group are equal (or none is scorable): advantage 0 by formula."""
    high = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    low = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return high <= low


def sample_std(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """NaN-aware standard deviation with Bessel's correction (n − 1), as TRL's and the papers' code use it.

    A single scorable value has no spread: 0.
    """
    count = (~values.isnan()).sum(dim=dim, keepdim=True)
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return std if keepdim else std.squeeze(dim)


def population_std(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """NaN-aware standard deviation with n in the denominator: of these completions, not of what they were drawn
    from."""
    centred = values - values.nanmean(dim=dim, keepdim=True)
    count = (~values.isnan()).sum(dim=dim, keepdim=True).clamp(min=1)
    std = (centred.square().nansum(dim=dim, keepdim=True) / count).sqrt()
    return std if keepdim else std.squeeze(dim)


#: setting ``std`` of a rule → the standard deviation it divides by
DEVIATIONS: dict[str, Callable[[Tensor, int, bool], Tensor]] = {"sample": sample_std, "population": population_std}


def check_std(std: str) -> None:
    """At the door of the rules that divide by a standard deviation: which one."""
    if std not in DEVIATIONS:
        raise ValueError(
            f"`advantage.std` is {std!r}; it must be one of {sorted(DEVIATIONS)} (n or n − 1 in the denominator)"
        )


def check_epsilon(epsilon: float) -> None:
    """At the door of the rules that divide by a standard deviation: what is added to it keeps it a divisor."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"`advantage.epsilon` is {epsilon}; it must be a finite number ≥ 0")


def scorable(advantages: Tensor, rewards: Tensor) -> Tensor:
    """``[N]`` in the rewards' own type. Unscorable rows (NaN) carry no signal: advantage 0."""
    return advantages.reshape(-1).nan_to_num(nan=0.0).to(rewards.dtype)
