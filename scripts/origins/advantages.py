"""Advantage rules beside their origins: rewards of six groups of four, one dead, completions of one to nine tokens."""

from __future__ import annotations

import math
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_lab.advantages import OptimalTokenBaseline, PassAtK, advantage_rule, level_of
from grpo_lab.batch import LocalRows, RewardTable
from origins.frame import Config, Origin, Pairs, Row
from origins.verl import PATH

Theirs = Callable[..., Any]
GROUPS, SIZE, WIDTH = 6, 4, 9


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Stand in for verl's function of this name: variance over n − 1, 1e-8 under the root."""
    chosen = values[mask.bool()]
    return (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8)


NAMES = {
    "verl_F": types.SimpleNamespace(masked_whiten=masked_whiten),
    "defaultdict": defaultdict,
    "AlgoConfig": Config,
}


def verl(function: str, repository: str = "volcengine/verl") -> Origin:
    return Origin(repository, PATH, function, names=NAMES)


def case(seed: int, binary: bool = False) -> tuple[RewardTable, Tensor]:
    """Return a table of float64 rewards, multiples of 1/64 so that sums in float32 are exact, and the token mask."""
    random = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 2 if binary else 129, (GROUPS, SIZE), generator=random).double()
    rewards = rewards if binary else rewards / 64
    rewards[0] = rewards[0, 0]
    lengths = torch.randint(1, WIDTH + 1, (GROUPS * SIZE,), generator=random)
    table = RewardTable(rewards.reshape(-1, 1), ("r",), torch.ones(1), SIZE, lengths=lengths)
    return table, torch.arange(WIDTH) < lengths.unsqueeze(1)


def paid_at_the_end(table: RewardTable, mask: Tensor) -> Tensor:
    """Return token-level rewards ``[N, T]`` as verl has them: a completion's reward on its last token."""
    last = torch.arange(WIDTH) == mask.sum(1, keepdim=True) - 1
    return table.total.unsqueeze(1) * last


def groups() -> np.ndarray:
    return np.arange(GROUPS * SIZE) // SIZE


def held(part: str, binary: bool = False, knobs: dict[str, Any] | None = None, **theirs_too: Any) -> Any:
    """Return ``pairs`` for an estimator of verl's form; ``knobs`` are ours, the rest is handed to theirs."""

    def pairs(theirs: Theirs, seed: int) -> Pairs:
        table, mask = case(seed, binary)
        rule = advantage_rule(part, **(knobs or {}))
        mine = rule(table.total, SIZE) if level_of(rule) == "row" else rule(table)
        found, _ = theirs(paid_at_the_end(table, mask), mask.double(), groups(), **theirs_too)
        yield found, mine.unsqueeze(1) * mask

    return pairs


def pass_at_k(theirs: Theirs, seed: int) -> Pairs:
    table, _ = case(seed, binary=True)
    for group in table.total.view(GROUPS, SIZE):
        for k in (1, 2, 3):
            yield torch.from_numpy(theirs(group.numpy(), k)), PassAtK(k)(group, SIZE)


def optimal_token_baseline(theirs: Theirs, seed: int) -> Pairs:
    table, mask = case(seed)
    random = torch.Generator().manual_seed(seed)
    logps = (3 * torch.randn(*mask.shape, 11, generator=random, dtype=torch.float64)).log_softmax(-1)
    chosen, squares = logps[..., 0], logps.exp().square().sum(-1)
    energy = 1 - 2 * chosen.exp() + squares
    local = LocalRows(slice(0, GROUPS * SIZE), mask, mask.sum(1), token_energy=energy)
    found, _ = theirs(paid_at_the_end(table, mask), mask.double(), groups(), chosen, squares)
    yield found, OptimalTokenBaseline()(replace(table, local=local))


def comb(n: int, k: int) -> float:
    """Stand in for scipy's function of this name."""
    return float(math.comb(n, k)) if 0 <= k <= n else 0.0


MAXRL = "tajwarfahim/maxrl"
ROWS = [
    Row("maxrl", verl("compute_maxrl_outcome_advantage", MAXRL), held("maxrl")),
    Row(
        "pass_at_k",
        Origin("RUCAIBox/Passk_Training", "code/passk_adv.py", "calc_adv", names={"comb": comb}),
        pass_at_k,
        "k of 1, 2 and 3",
    ),
    Row(
        "passk_margin",
        verl("compute_grpo_passk_outcome_advantage"),
        held("passk_margin", config=Config(norm_adv_by_std_in_grpo=False)),
        "without the standard deviation",
    ),
    Row(
        "passk_margin",
        verl("compute_grpo_passk_outcome_advantage"),
        held("passk_margin", knobs={"over_std": True}, config=Config(norm_adv_by_std_in_grpo=True)),
        "over the standard deviation",
    ),
    Row(
        "optimal_token_baseline",
        verl("compute_optimal_token_baseline_advantage"),
        optimal_token_baseline,
        "theirs adds 1e-8 to the denominator",
    ),
    Row("opo", verl("compute_opo_outcome_advantage"), held("opo")),
    Row(
        "reinforce_pp_baseline",
        verl("compute_reinforce_plus_plus_baseline_outcome_advantage"),
        held("reinforce_pp_baseline"),
    ),
]
