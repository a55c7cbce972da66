"""The return of a token: the sum of the rewards that follow it; REINFORCE's rule from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.baselines import GroupMax, GroupMean, GroupZScore, LeaveOneOut, Raw
from grpo_lab.batch import RewardTable, safe


def check_discount(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is a number in [0, 1]; ``name`` is its name in the message."""
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")


def reward_to_go(values: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted sum of the values from each token on, ``[B, T]``:

        G_t = Σ_{s ≥ t, s own} γ^{n(t,s)} · v_s,    n(t,s) = own tokens from t (inclusive) to s (exclusive)

    Own tokens are those that the policy generated (``mask``). Tool output and padding are no time steps and get 0. The
    sum is computed in log₂ T passes: after pass k a token holds the sum over its next 2ᵏ own tokens.

    Args:
        values: v, ``[B, T]``; read only where ``mask`` is True.
        mask: bool ``[B, T]``.
        gamma: discount γ in [0, 1] per own token.
    """
    check_discount("gamma", gamma)
    order = (~mask).long().argsort(dim=1, stable=True)  # own tokens first, in their order
    summed = safe(values, mask).gather(1, order)
    width = summed.size(1)
    reach = 1
    while reach < width:
        ahead = torch.nn.functional.pad(summed[:, reach:], (0, reach))
        summed = summed + gamma**reach * ahead
        reach *= 2
    return torch.zeros_like(summed).scatter(1, order, summed).masked_fill(~mask, 0.0)


DELTAS: dict[str, Callable[[], Callable[[Tensor, int], Tensor]]] = {
    "raw": Raw,
    "group_mean": GroupMean,
    "group_zscore": GroupZScore,
    "leave_one_out": LeaveOneOut,
    "group_max": GroupMax,
}


def check_delta(name: str) -> None:
    """Raise ValueError unless the knob ``delta`` is the name of a rule in ``DELTAS``."""
    if name not in DELTAS:
        raise ValueError(f"`advantage.delta` is {name!r}; it must be one of {tuple(DELTAS)}")


@dataclass(frozen=True)
class Returns:
    """Pay a completion's advantage Δ_i at its last own token, and give each token its discounted return: Â_{i,t} =
    γ^{own tokens after t} · Δ_i.

    Δ_i is what ``delta`` makes of the completion's reward. With γ = 1 every token gets Δ_i.

    Source: Williams 1992; the return and the deltas: CS336 lecture 17. With γ < 1 and a centred delta, what is
    subtracted depends on how long the completion still goes on. It is then no baseline but a part of the reward
    (docs/algorithms/reinforce.md); ``raw`` is unbiased.

    Args:
        gamma: γ in [0, 1], per own token.
        delta: the rule that makes Δ of a group's rewards: ``raw``, ``group_mean``, ``group_zscore``, ``leave_one_out``,
            ``group_max``.
    """

    level: ClassVar[str] = "token"
    gamma: float = 1.0
    delta: str = "group_mean"

    def __post_init__(self) -> None:
        check_discount("`advantage.gamma`", self.gamma)
        check_delta(self.delta)

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` (float64) of this rank's rows. Raises ValueError for a table without ``local``
        rows."""
        if table.local is None:
            raise ValueError("`returns` makes advantages per token and was called on a table without `local` rows")
        mask = table.local.mask
        row = DELTAS[self.delta]()(table.total, table.group_size)[table.local.rows].to(mask.device, torch.float64)
        place = torch.arange(mask.size(1), device=mask.device)
        last = (place * mask).amax(dim=1, keepdim=True)
        paid = torch.where(mask & (place == last), row.unsqueeze(1), torch.zeros_like(row).unsqueeze(1))
        return reward_to_go(paid, mask, self.gamma)
