"""REINFORCE's return: the reward comes at the end, and a token is paid the less, the further it is from there.

Reward-to-go: every token gets what the policy's tokens from there on are paid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.group import GroupMax, GroupMean, GroupZScore, LeaveOneOut, Raw
from grpo_lab.batch import RewardTable, safe


def reward_to_go(values: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = Σ_{s ≥ t, s own} γ^{n(t,s)} · v_s, where n(t,s) is the number of own tokens from t (inclusive) to s
    (exclusive).

    Own are the tokens that the policy made (``mask``): tool output and padding are no time steps, pay nothing and get
    0. Computed by doubling (after pass k a token holds its next 2ᵏ own tokens), so T tokens take log₂ T passes and
    every number is a sum of T terms at most.

    Args:
        values: ``[B, T]``; read only where ``mask`` is True.
        mask: bool ``[B, T]``.
        gamma: discount in [0, 1] per own token.
    """
    if not (math.isfinite(gamma) and 0 <= gamma <= 1):
        raise ValueError(f"gamma is {gamma}; a discount lies in [0, 1]")
    order = (~mask).long().argsort(dim=1, stable=True)  # own tokens first, in their order
    summed = safe(values, mask).gather(1, order)
    width, reach = summed.size(1), 1
    while reach < width:
        ahead = torch.nn.functional.pad(summed[:, reach:], (0, reach))
        summed = summed + gamma**reach * ahead
        reach *= 2
    return torch.zeros_like(summed).scatter(1, order, summed).masked_fill(~mask, 0.0)


DELTAS: dict[str, Callable[[], Any]] = {
    "raw": Raw,
    "group_mean": GroupMean,
    "group_zscore": GroupZScore,
    "leave_one_out": LeaveOneOut,
    "group_max": GroupMax,
}


@dataclass(frozen=True)
class Returns:
    """Â_{i,t} = Σ_{k ≥ t} γ^{n(t,k)} r_{i,k}, where r_{i,k} is the delta of the completion's reward on its last own
    token and 0 before.

    n(t,k) counts the tokens that the policy made from t (inclusive) to k (exclusive): tool output and padding are no
    time steps, so Â_{i,t} = γ^{own tokens after t} · Δ_i. With γ = 1 this is the row rule ``delta`` on every token.

    Source: Williams 1992; the return and the deltas: CS336 lecture 17. With γ < 1 and a centred delta what is taken off
    depends on how long the completion still goes on: it is no baseline then but a part of the reward
    (docs/algorithms/reinforce.md); ``raw`` is unbiased.

    Args:
        gamma: γ in [0, 1], per own token.
        delta: ``raw``, ``group_mean``, ``group_zscore``, ``leave_one_out`` or ``group_max``: what becomes of the
            rewards of a group.
    """

    level: ClassVar[str] = "token"
    gamma: float = 1.0
    delta: str = "group_mean"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gamma) and 0 <= self.gamma <= 1):
            raise ValueError(f"`advantage.gamma` is {self.gamma}; a discount lies in [0, 1]")
        if self.delta not in DELTAS:
            raise ValueError(f"`advantage.delta` is {self.delta!r}; it must be one of {tuple(DELTAS)}")

    def __call__(self, table: RewardTable) -> Tensor:
        """Advantages ``[B, T]`` (float64) of this rank's rows.

        Raises:
            ValueError: the table does not say which rows are this rank's.
        """
        if table.local is None:
            raise ValueError("`returns` makes advantages per token and was called on a table without `local` rows")
        mask = table.local.mask
        row = DELTAS[self.delta]()(table.total, table.group_size)[table.local.rows].to(mask.device, torch.float64)
        place = torch.arange(mask.size(1), device=mask.device)
        last = (place * mask).amax(dim=1, keepdim=True)
        paid = torch.where(mask & (place == last), row.unsqueeze(1), torch.zeros_like(row).unsqueeze(1))
        return reward_to_go(paid, mask, self.gamma)
