"""Rules from the rewards that follow a token: REINFORCE's return, and generalised advantage estimation from a critic's
values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.group import GroupMax, GroupMean, GroupZScore, LeaveOneOut, Raw
from grpo_lab.batch import RewardTable, safe

#: λ of generalised advantage estimation.
LAM = 0.95


def _check_share(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")


def reward_to_go(values: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = Σ_{s ≥ t, s own} γ^{n(t,s)} · v_s, with n(t,s) own tokens from t (inclusive) to s (exclusive).

    Own tokens are those that the policy generated (``mask``). Tool output and padding are no time steps and get 0. The
    sum is computed in log₂ T passes: after pass k a token holds the sum over its next 2ᵏ own tokens.

    Args:
        values: ``[B, T]``; read only where ``mask`` is True.
        mask: bool ``[B, T]``.
        gamma: discount in [0, 1] per own token.
    """
    _check_share("gamma", gamma)
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


@dataclass(frozen=True)
class Returns:
    """Â_{i,t} = Σ_{k ≥ t} γ^{n(t,k)} r_{i,k}, where r_{i,k} is Δ_i on the last own token and 0 before it.

    Δ_i is what ``delta`` makes of the completion's reward; n(t,k) counts own tokens as in ``reward_to_go``. So Â_{i,t}
    = γ^{own tokens after t} · Δ_i; with γ = 1 every token gets Δ_i.

    Source: Williams 1992; the return and the deltas: CS336 lecture 17. With γ < 1 and a centred delta, what is
    subtracted depends on how long the completion still goes on. It is then no baseline but a part of the reward
    (docs/algorithms/reinforce.md); ``raw`` is unbiased.

    Args:
        gamma: γ in [0, 1], per own token.
        delta: how Δ is made of a group's rewards: ``raw``, ``group_mean``, ``group_zscore``, ``leave_one_out``,
            ``group_max``.
    """

    level: ClassVar[str] = "token"
    gamma: float = 1.0
    delta: str = "group_mean"

    def __post_init__(self) -> None:
        _check_share("`advantage.gamma`", self.gamma)
        if self.delta not in DELTAS:
            raise ValueError(f"`advantage.delta` is {self.delta!r}; it must be one of {tuple(DELTAS)}")

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` (float64) of this rank's rows. Raises ValueError for a table without them
        (``local``)."""
        if table.local is None:
            raise ValueError("`returns` makes advantages per token and was called on a table without `local` rows")
        mask = table.local.mask
        row = DELTAS[self.delta]()(table.total, table.group_size)[table.local.rows].to(mask.device, torch.float64)
        place = torch.arange(mask.size(1), device=mask.device)
        last = (place * mask).amax(dim=1, keepdim=True)
        paid = torch.where(mask & (place == last), row.unsqueeze(1), torch.zeros_like(row).unsqueeze(1))
        return reward_to_go(paid, mask, self.gamma)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = LAM) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the policy's own tokens (arXiv 1506.02438, eq. 11 to 16).

        δ_t = r_t + γ·V_{t⁺} − V_t        Â_t = Σ_{s ≥ t} (γλ)^{n(t,s)} δ_s        R_t = Â_t + V_t

    t⁺ is the next own token, and n(t,s) counts as in ``reward_to_go``. After the last one the value is 0: a completion
    is an episode, even if it was truncated. λ = 1 and V = 0 give the reward-to-go; λ = 0 the one-step error δ.

    Args:
        rewards: ``[B, T]``, read only where ``mask`` is True.
        values: ``[B, T]``, the critic's, in units of the reward; read only where ``mask`` is True.
        mask: bool ``[B, T]``.
        gamma: discount in [0, 1] per own token.
        lam: λ in [0, 1], how far errors of the values reach back.

    Returns:
        ``(advantages, returns)``, both ``[B, T]`` and 0 where ``mask`` is False; detach ``values`` first.

    Raises:
        ValueError: γ or λ outside [0, 1], or shapes that differ or are not ``[B, T]``.
    """
    _check_share("gamma", gamma)
    _check_share("lam", lam)
    if not (rewards.shape == values.shape == mask.shape and rewards.dim() == 2):
        shapes = [tuple(x.shape) for x in (rewards, values, mask)]
        raise ValueError(f"rewards, values and mask have the shapes {shapes}; they must be one shape [B, T]")
    mask = mask.bool()
    own = safe(values, mask)
    order = (~mask).long().argsort(dim=1, stable=True)  # own tokens first, in their order; 0 behind them
    following = torch.nn.functional.pad(own.gather(1, order)[:, 1:], (0, 1))
    ahead = torch.zeros_like(own).scatter(1, order, following)
    advantages = reward_to_go(safe(rewards, mask) + gamma * ahead - own, mask, gamma * lam)
    return advantages, (advantages + own).masked_fill(~mask, 0.0)


@dataclass(frozen=True)
class GAE:
    """``gae`` as a rule of level ``token``: advantages from the rewards of this rank's tokens and a critic's values.

    Reads ``table.local.rewards`` and ``table.local.values``, which a trainer with a critic (``value``) puts there.
    Whitening is the trainer's: it takes the tokens of all ranks.

    Source: GAE (arXiv 1506.02438); γ = 1 and λ = 0.95 are PPO's usual ones for language models.

    Args:
        gamma: discount in [0, 1] per own token.
        lam: λ in [0, 1].
    """

    gamma: float = 1.0
    lam: float = LAM
    level: ClassVar[str] = "token"
    #: A run with this rule has a critic.
    reads_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_share("`advantage.gamma`", self.gamma)
        _check_share("`advantage.lam`", self.lam)

    def __call__(self, table: RewardTable) -> Tensor:
        local = table.local
        if local is None or local.rewards is None or local.values is None:
            said = "which reads a critic's values, and the table has none (`table.local`)"
            raise ValueError(f"`advantage` is 'gae', {said}")
        return gae(local.rewards, local.values, local.mask, self.gamma, self.lam)[0]


def reads_values(rule: object) -> bool:
    """Return whether the rule computes advantages from a critic's values."""
    return bool(getattr(rule, "reads_values", False))
