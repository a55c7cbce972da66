"""Advantage rules, which turn rewards into advantages. Pure torch. ``advantage_rule(name)`` finds one.

A rule has a level, its class attribute ``level``, which says what it gets and returns (``level_of``):

    row      rewards ``[N]`` → one advantage per completion: ``baselines``, ``success_rate``
    table    the whole reward table → one advantage per completion: ``whole_table``, ``mixed``
    token    the whole reward table → one advantage per token of this rank's rows: ``returns``, ``process``, ``gae``,
             ``token_baseline``, ``turn_credit``, ``turn_gae``

``group`` is what rules of a group share. ``step_table`` and ``turn_table`` hold the scores of steps and turns.
``whiten`` normalises advantages over the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_lab import registry
from grpo_lab.advantages.baselines import (
    BatchZScore,
    GroupMax,
    GroupMean,
    GroupZScore,
    LeaveOneOut,
    PasskMargin,
    Raw,
)
from grpo_lab.advantages.gae import GAE, gae, reads_values
from grpo_lab.advantages.mixed import MixedAdvantage
from grpo_lab.advantages.process import Process, outcome_of
from grpo_lab.advantages.returns import Returns, reward_to_go
from grpo_lab.advantages.step_table import StepTable, spread
from grpo_lab.advantages.success_rate import MaxRL, PassAtK
from grpo_lab.advantages.token_baseline import OptimalTokenBaseline, reads_token_energy
from grpo_lab.advantages.turn_credit import TurnReturns, TurnSpread
from grpo_lab.advantages.turn_gae import TurnGAE
from grpo_lab.advantages.turn_table import on_own_tokens
from grpo_lab.advantages.whiten import Moments, level_of, masked_moments, reads_steps, takes_penalty, token_rule, whiten
from grpo_lab.advantages.whole_table import GDPO, OPO, ReinforcePPBaseline

AdvantageRule = Callable[[Tensor, int], Tensor]
"""``rule(rewards [N], group_size) -> advantages [N]``: a rule of level ``row``.

The completions of a group are neighbours. A reward that is NaN could not be scored; its row gets 0. A rule of level
``table`` or ``token`` is called as ``rule(table)`` with the ``RewardTable``.
"""

RESERVED = ("name",)
"""Keys of ``advantage: {…}`` that cannot be knobs."""

#: rules that make one advantage per completion (levels ``row`` and ``table``)
RULES: dict[str, Callable[..., Any]] = {
    "raw": Raw,
    "group_mean": GroupMean,
    "group_zscore": GroupZScore,
    "batch_zscore": BatchZScore,
    "leave_one_out": LeaveOneOut,
    "group_max": GroupMax,
    "maxrl": MaxRL,
    "pass_at_k": PassAtK,
    "passk_margin": PasskMargin,
    "gdpo": GDPO,
    "opo": OPO,
    "reinforce_pp_baseline": ReinforcePPBaseline,
}
#: rules that make advantages per token (``level``): ``rule(table) -> [B, T]`` of this rank's rows
TOKEN_RULES: dict[str, Callable[..., Any]] = {
    "process": Process,
    "returns": Returns,
    "gae": GAE,
    "optimal_token_baseline": OptimalTokenBaseline,
    "turn_returns": TurnReturns,
    "turn_spread": TurnSpread,
    "turn_gae": TurnGAE,
}

__all__ = [
    "GAE",
    "GDPO",
    "OPO",
    "RULES",
    "TOKEN_RULES",
    "AdvantageRule",
    "BatchZScore",
    "GroupMax",
    "GroupMean",
    "GroupZScore",
    "LeaveOneOut",
    "MaxRL",
    "MixedAdvantage",
    "Moments",
    "OptimalTokenBaseline",
    "PassAtK",
    "PasskMargin",
    "Process",
    "Raw",
    "ReinforcePPBaseline",
    "Returns",
    "StepTable",
    "TurnGAE",
    "TurnReturns",
    "TurnSpread",
    "advantage_rule",
    "gae",
    "level_of",
    "masked_moments",
    "on_own_tokens",
    "outcome_of",
    "reads_steps",
    "reads_token_energy",
    "reads_values",
    "register_advantage",
    "reward_to_go",
    "spread",
    "takes_penalty",
    "token_rule",
    "whiten",
]


def advantage_rule(name: str, **parameters: Any) -> Any:
    """Return the advantage rule called ``name``, built with ``parameters``, the fields of its dataclass. Raises
    ValueError for an unknown name or parameter."""
    return registry.built(registry.found({**RULES, **TOKEN_RULES}, name, "advantage"), parameters, "advantage")


def register_advantage(name: str, part: Any = None) -> Any:
    """Register ``part`` under ``name``, so that ``advantage: name`` selects it. Also usable as a decorator.

    Args:
        name: the name in recipes.
        part: a function, or a dataclass whose fields are its knobs.

    Raises:
        ValueError: another object has the name already, the part cannot be called, or its ``level`` is unknown.
    """
    if part is None:
        return lambda later: register_advantage(name, later)
    table = TOKEN_RULES if level_of(part) == "token" else RULES
    registry.add({**RULES, **TOKEN_RULES}, name, part, RESERVED, "advantage rule")
    table[name] = part
    return part
