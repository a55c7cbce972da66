"""Credit for turns from a critic: advantages over turns, then over the tokens of each turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.gae import LAM, gae
from grpo_lab.advantages.returns import check_discount
from grpo_lab.advantages.turn_table import scored_turns, turn_of_tokens
from grpo_lab.batch import RewardTable


@dataclass(frozen=True)
class TurnGAE:
    """Compute GAE at two levels, first over the turns of a completion and then over the tokens of each turn:

        over turns      Â_k = Σ_{j ≥ k} (γ_turn λ)^{j−k} δ_j,   δ_k = r_k + γ_turn V_{k+1} − V_k,   G_k = Â_k + V_k
        within turn k   ``gae`` with γ and λ, where the turn's last token earns G_k and nothing follows

    V_k is the critic's value at the last own token of turn k. r_k is what that token earns: the turn's score, and in
    the last turn the outcome as well. So the last token of a turn gets Â_k. Own tokens behind the last scored turn are
    one more turn. A KL charged per token counts within its turn. The critic learns Â + V at every own token.

    Source: RAGEN (arXiv 2504.20073; the formulas are those of its code, with one λ as there; VAGEN's code has a second
    one). There a turn's end is where a reward is not 0; here a turn of score 0 is a turn, too.

    Args:
        gamma: γ in [0, 1] per own token within a turn.
        lam: λ in [0, 1], at both levels.
        turn_gamma: γ_turn in [0, 1], per turn.
    """

    level: ClassVar[str] = "token"
    reads_steps: ClassVar[bool] = True
    #: A run with this rule has a critic.
    reads_values: ClassVar[bool] = True
    gamma: float = 1.0
    lam: float = LAM
    turn_gamma: float = 1.0

    def __post_init__(self) -> None:
        for name in ("gamma", "lam", "turn_gamma"):
            check_discount(f"`advantage.{name}`", getattr(self, name))

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` (float64) of this rank's rows. Raises ValueError for a table without a critic's
        values (``local``)."""
        local = table.local
        if local is None or local.rewards is None or local.values is None:
            raise ValueError("`advantage` is 'turn_gae', which reads a critic's values, and the table has none")
        mask = local.mask
        turn = turn_of_tokens(scored_turns(table)[1][local.rows], mask.size(1)).to(mask.device)
        own = [mask & (turn == k) for k in range(int(turn.max()) + 1)]
        places = torch.arange(mask.size(1), device=mask.device)
        last = torch.stack([(places * tokens).amax(1) for tokens in own], dim=1)  # [B, K]
        there = torch.stack([tokens.any(1) for tokens in own], dim=1)
        earned = local.rewards.gather(1, last)
        before = local.values.gather(1, last)
        _, goals = gae(earned, before, there, self.turn_gamma, self.lam)
        found = torch.zeros_like(local.values)
        for k, tokens in enumerate(own):
            at_the_end = tokens & (places == last[:, k : k + 1])
            rewards = torch.where(at_the_end, goals[:, k : k + 1], local.rewards)
            found = found + gae(rewards, local.values, tokens, self.gamma, self.lam)[0]
        return found
