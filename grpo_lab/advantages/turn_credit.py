"""Credit for turns from the group: every token gets the advantage of its turn; tokens behind the last turn get 0.

A turn that was not scored adds nothing to a return, and still gets the credit of what came after it. If neither turn k
nor any later one was scored, turn k has no return: it takes no part in a baseline, and gets 0. A baseline compares the
returns of a group for the same turn index. A turn that has nothing to be compared with, since no other completion of
its group has a return there, gets 0 from the baselines ``group_mean``, ``group_zscore`` and ``leave_one_out``.
(``turn_table`` says what a turn is.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.returns import DELTAS, check_delta, check_discount
from grpo_lab.advantages.turn_table import (
    discounted,
    known_sum,
    outcome_of_rows,
    over_tokens,
    paid_at_the_end,
    scored_turns,
)
from grpo_lab.batch import RewardTable


@dataclass(frozen=True)
class TurnReturns:
    """Give every token of turn k the advantage of the turn's return:

        Â_{i,k} = Δ(R_{i,k}),    R_{i,k} = Σ_{j ≥ k} γ^{j−k} r_{i,j} + γ^{K_i−k} o_i

    r are the scores of turns; o is the outcome, the reward of the whole completion, paid in its last turn K_i. Δ is
    what ``delta`` makes of the group's returns for the same turn index k: the return itself (``raw``), its distance
    from their mean (``group_mean``), that distance over their deviation (``group_zscore``), the distance from the mean
    of the others (``leave_one_out``), or the return where it is the largest and else 0 (``group_max``).

    Source: the returns are those of GiGPO (arXiv 2505.10978, eq. 5). The comparison by turn index is that of MT-GRPO's
    code (arXiv 2505.11821, advantages "cae": z-scores of r_1 + γ·o in the first turn, of o in the second). GiGPO
    compares turns that begin in the same state instead. With ``raw``: Williams 1992.

    The gradient is unbiased with ``raw``. With a baseline a turn that no other completion of the group reaches teaches
    nothing, so late turns of long trajectories count less.

    Args:
        gamma: γ in [0, 1], per turn. With 0 each turn answers for its own score only.
        delta: ``raw``, ``group_mean``, ``group_zscore``, ``leave_one_out``, ``group_max``.
    """

    level: ClassVar[str] = "token"
    reads_steps: ClassVar[bool] = True
    #: The KL of a completion (``kl.per: sequence``) is subtracted from its outcome; without an outcome it is refused.
    penalises_outcome: ClassVar[bool] = True
    gamma: float = 1.0
    delta: str = "group_mean"

    def __post_init__(self) -> None:
        check_discount("`advantage.gamma`", self.gamma)
        check_delta(self.delta)

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` (float64) of this rank's rows. Raises ValueError for a table without ``local``
        rows."""
        if table.local is None:
            raise ValueError("advantages of turns are made per token, and the table has no rows of this rank (`local`)")
        scores, ends = scored_turns(table)
        made = self.of_turns(table, scores, ends)
        return over_tokens(made[table.local.rows], ends[table.local.rows], table.local.mask.size(1))

    def of_turns(self, table: RewardTable, scores: Tensor, ends: Tensor) -> Tensor:
        """Return the advantage ``[N, K]`` of each turn, from the turns' ``scores`` and ``ends`` (``scored_turns``)."""
        paid = paid_at_the_end(outcome_of_rows(table), ends, self.gamma)
        return self.compared(known_sum(torch.stack([discounted(scores, self.gamma), paid])), table.group_size)

    def compared(self, returns: Tensor, size: int) -> Tensor:
        """Return Δ of returns ``[N, K]``: each is compared with those of its group, of ``size`` completions, for the
        same k."""
        rows, turns = returns.shape
        together = returns.view(-1, size, turns).transpose(1, 2)  # [groups, K, G]
        made = DELTAS[self.delta]()(together.reshape(-1), size)
        return made.view(-1, turns, size).transpose(1, 2).reshape(rows, turns)


@dataclass(frozen=True)
class TurnSpread(TurnReturns):
    """Give every token of turn k the outcome's advantage plus that of the turn's return:

        Â_{i,k} = Δ(o_i) + w · Δ(R_{i,k}),    R_{i,k} = Σ_{j ≥ k} γ^{j−k} r_{i,j}

    r are the scores of turns, o is the outcome, and Δ is as in ``TurnReturns``. The outcome's advantage is the same for
    all turns; it is 0 for a completion without an outcome.

    Source: MT-GRPO (arXiv 2505.11821; its code's advantages "aae": turn and outcome each as z-scores, the weight at the
    turn's). There two turns are known, and only the one before the tool's answer gets the turn's part. GiGPO (arXiv
    2505.10978, eq. 8) adds up both parts with such a weight, too.

    Args:
        gamma: γ in [0, 1], per turn. With 0 each turn answers for its own score only, as in the source.
        delta: as in ``TurnReturns``, for both parts.
        weight: w ≥ 0.
    """

    gamma: float = 0.0
    delta: str = "group_zscore"
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"`advantage.weight` is {self.weight}; it must be a finite number ≥ 0")

    def of_turns(self, table: RewardTable, scores: Tensor, ends: Tensor) -> Tensor:
        outcome = DELTAS[self.delta]()(outcome_of_rows(table), table.group_size)
        return outcome.unsqueeze(1) + self.weight * self.compared(discounted(scores, self.gamma), table.group_size)
