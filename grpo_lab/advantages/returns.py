"""REINFORCE's return: the reward comes at the end, and a token is paid the less, the further it is from there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.group_max import GroupMax
from grpo_lab.advantages.group_mean import GroupMean
from grpo_lab.advantages.group_zscore import GroupZScore
from grpo_lab.advantages.leave_one_out import LeaveOneOut
from grpo_lab.advantages.raw import Raw
from grpo_lab.advantages.reward_to_go import reward_to_go
from grpo_lab.batch import RewardTable

DELTAS: dict[str, Callable[[], Any]] = {
    "raw": Raw,
    "group_mean": GroupMean,
    "group_zscore": GroupZScore,
    "leave_one_out": LeaveOneOut,
    "group_max": GroupMax,
}


@dataclass(frozen=True)
class Returns:
    """Â_{i,t} = Σ_{k ≥ t} γ^{n(t,k)} r_{i,k}, where r_{i,k} is the delta of the completion's reward on its last own token and 0 before.

    n(t,k) counts the tokens that the policy made from t (inclusive) to k (exclusive): tool output and padding are no time steps, so
    Â_{i,t} = γ^{own tokens after t} · Δ_i. With γ = 1 this is the row rule ``delta`` on every token.

    Source: Williams 1992; the return and the deltas: CS336 lecture 17. With γ < 1 and a centred delta what is taken off depends on how
    long the completion still goes on: it is no baseline then but a part of the reward (docs/algorithms/reinforce.md); ``raw`` is unbiased.

    Args:
        gamma: γ in [0, 1], per own token.
        delta: ``raw``, ``group_mean``, ``group_zscore``, ``leave_one_out`` or ``group_max``: what becomes of the rewards of a group.
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


__all__ = ["DELTAS", "Returns"]
