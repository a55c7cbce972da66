"""Generalised advantage estimation, from the rewards that follow a token and a critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.returns import check_discount, reward_to_go
from grpo_lab.batch import RewardTable, safe

#: λ of generalised advantage estimation.
LAM = 0.95


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = LAM) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of the policy's own tokens, the True ones of ``mask`` (arXiv 1506.02438, eq. 11 to
    16).

        δ_t = r_t + γ·V_{t⁺} − V_t        Â_t = Σ_{s ≥ t} (γλ)^{n(t,s)} δ_s        R_t = Â_t + V_t

    t⁺ is the next own token, and n(t,s) counts own tokens as in ``reward_to_go``. After the last one the value is 0: a
    completion is an episode, even if it was truncated. λ = 1 and V = 0 give the reward-to-go; λ = 0 gives the one-step
    error δ.

    Args:
        rewards: ``[B, T]``, read only where ``mask`` is True.
        values: V, ``[B, T]``, the critic's, in units of the reward; read only where ``mask`` is True. Detach them
            first.
        mask: bool ``[B, T]``.
        gamma: discount γ in [0, 1] per own token.
        lam: λ in [0, 1], how far errors of the values reach back.

    Returns:
        ``(advantages, returns)``, both ``[B, T]`` and 0 where ``mask`` is False.

    Raises:
        ValueError: γ or λ is outside [0, 1], or shapes differ or are not ``[B, T]``.
    """
    check_discount("gamma", gamma)
    check_discount("lam", lam)
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

    It reads ``table.local.rewards`` and ``table.local.values``, which a trainer with a critic (``value``) puts there.
    The trainer whitens the result, since that takes the tokens of all ranks.

    Source: GAE (arXiv 1506.02438); γ = 1 and λ = 0.95 are PPO's usual ones for language models.

    Args:
        gamma: discount γ in [0, 1] per own token.
        lam: λ in [0, 1].
    """

    gamma: float = 1.0
    lam: float = LAM
    level: ClassVar[str] = "token"
    #: A run with this rule has a critic.
    reads_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_discount("`advantage.gamma`", self.gamma)
        check_discount("`advantage.lam`", self.lam)

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` of this rank's rows. Raises ValueError for a table without a critic's values
        (``local``)."""
        local = table.local
        if local is None or local.rewards is None or local.values is None:
            said = "which reads a critic's values, and the table has none (`table.local`)"
            raise ValueError(f"`advantage` is 'gae', {said}")
        return gae(local.rewards, local.values, local.mask, self.gamma, self.lam)[0]


def reads_values(rule: object) -> bool:
    """Return whether the rule computes advantages from a critic's values."""
    return bool(getattr(rule, "reads_values", False))
