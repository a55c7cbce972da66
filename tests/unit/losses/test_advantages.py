"""Advantage rules: hand values. Properties that all rules share are in
``tests/conformance/test_advantage_rules.py``."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import (
    GDPO,
    OPO,
    RULES,
    BatchZScore,
    GroupMax,
    GroupMean,
    GroupZScore,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    PasskMargin,
    Raw,
    ReinforcePPBaseline,
    advantage_rule,
)
from grpo_lab.advantages.group import deviation, is_dead
from grpo_lab.batch import RewardTable
from reference.cases import applied

NAN = math.nan
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 1.0, 3.0], dtype=torch.float64)  # two groups of four


CENTRED = [0.75, -0.25, -0.25, -0.25, 1, -1, -1, 1]


def over(deviations: list[float], epsilon: float = 1e-4) -> list[float]:
    """The centred rewards of each group divided by its deviation."""
    return [value / (deviations[place // 4] + epsilon) for place, value in enumerate(CENTRED)]


def close(found: Tensor, expected: list[float], tolerance: float = 1e-12) -> None:
    assert found.tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Raw(), REWARDS.tolist()),
        # means 1/4 and 8/4 = 2
        (GroupMean(), CENTRED),
        # group 1: Σ² = 9/16 + 3/16 = ¾; variance ¾/3 = ¼; std ½. Group 2: Σ² = 4; variance 4/3; std 2/√3
        (GroupZScore(), over([0.5, 2 / math.sqrt(3)])),
        # with n = 4 in place of n − 1 = 3: std √3/4 and 1
        (GroupZScore(std="population"), over([math.sqrt(3) / 4, 1.0])),
        # ε is added to the deviation, not to the variance
        (GroupZScore(epsilon=0.5), over([0.5, 2 / math.sqrt(3)], epsilon=0.5)),
        # batch mean 9/8; Σr² = 21; Σ(r − m)² = 21 − 81/8 = 87/8; variance 87/56, or 87/64 of the population
        (BatchZScore(), over([math.sqrt(87 / 56)] * 2)),
        (BatchZScore(std="population"), over([math.sqrt(87) / 8] * 2)),
        # 1 − 0; 0 − 1/3 three times; 3 − 5/3, 1 − 7/3, …
        (LeaveOneOut(), [1, -1 / 3, -1 / 3, -1 / 3, 4 / 3, -4 / 3, -4 / 3, 4 / 3]),
        (GroupMax(), [1, 0, 0, 0, 3, 0, 0, 3]),  # ties are kept
        (MaxRL(epsilon=0.0), [3, -1, -1, -1, 0.5, -0.5, -0.5, 0.5]),
        # 3 failures of 4, pairs: C(3, 2)/C(4, 2) = ½ fail, σ ½; beside a failure C(2, 1)/C(3, 1) = ⅔ fail
        (PassAtK(k=2, epsilon=0.0), [1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0]),
        # 2 failures: a sixth of the pairs fails, σ √5/6; beside a failure a third
        (PassAtK(k=2, success=3.0, epsilon=0.0), [0, 0, 0, 0, *(x / math.sqrt(5) for x in (1, -1, -1, 1))]),
        (PasskMargin(), [1, 0, 0, 0, 0, 0, 0, 0]),  # the second group's best is tied
        (PasskMargin(over_std=True, epsilon=0.0), [2, 0, 0, 0, 0, 0, 0, 0]),
        # z: (1.5, −½, −½, −½) and ±√¾; Σz² = 3 + 3; over 7
        (
            GDPO(epsilon=0.0),
            [z / math.sqrt(6 / 7) for z in (1.5, -0.5, -0.5, -0.5, *(math.sqrt(0.75) * c for c in CENTRED[4:]))],
        ),
        # b = 3/6 and (3 + 2 + 3 + 6)/8
        (OPO(), [0.5, -0.5, -0.5, -0.5, 1.25, -0.75, -0.75, 1.25]),
        # Σc² = ¾ + 4
        (ReinforcePPBaseline(over="completions", epsilon=0.0), [c / math.sqrt(4.75 / 7) for c in CENTRED]),
        # 14 tokens: Σlc = 3·¾ − ¾ + 1 − 2 − 3 + 2 = −½, m = −1/28; Σlc² = 3·9/16 + 3/16 + 8 = 79/8, less 14 m²
        (
            ReinforcePPBaseline(epsilon=0.0, std="population"),
            [(c + 1 / 28) / math.sqrt(79 / 8 / 14 - 1 / 28**2) for c in CENTRED],
        ),
    ],
    ids=str,
)
def test_hand_values(rule: Any, expected: list[float]) -> None:
    close(applied(rule, REWARDS, 4, torch.tensor([3, 1, 1, 1, 1, 2, 3, 2])), expected)


def test_what_a_rule_cannot_take_is_named() -> None:
    table = RewardTable(torch.zeros(4, 2), ("right", "kl"), torch.ones(2), 4, penalties=1)
    for rule, message in (
        (GDPO(), "would lose its coefficient"),
        (OPO(), "`lengths`"),
        (ReinforcePPBaseline(), "`leng"),
    ):
        with pytest.raises(ValueError, match=message):
            rule(table)
    with pytest.raises(ValueError, match=r"reward is -0\.5; `advantage: maxrl`"):
        MaxRL()(torch.tensor([1.0, -0.5]), 2)
    with pytest.raises(ValueError, match=r"`advantage\.k` is 0"):
        PassAtK(k=0)
    with pytest.raises(ValueError, match=r"`advantage\.over` is 'rows'; it must be one of"):
        ReinforcePPBaseline(over="rows")


def test_maxrl_follows_the_first_terms_of_log_p() -> None:
    """Over all outcomes of four completions: E[mean Â · ∂log P/∂p] = Σ_{k < 3} (1 − p)^k, p the chance to be right."""
    right = 0.3
    found = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=4):
        chance = math.prod(right if reward else 1 - right for reward in outcome)
        scores = [1 / right if reward else -1 / (1 - right) for reward in outcome]
        advantages = MaxRL(epsilon=0.0)(torch.tensor(outcome, dtype=torch.float64), 4).tolist()
        found += chance * sum(made * score for made, score in zip(advantages, scores, strict=True)) / 4
    assert found == pytest.approx(1 + 0.7 + 0.7**2, rel=1e-12)


def test_deviations_are_the_standard_librarys() -> None:
    values = torch.tensor([[0.3, -1.2, 2.5, 0.0], [1.0, NAN, 4.0, NAN], [0.5, NAN, NAN, NAN]], dtype=torch.float64)
    known = [[0.3, -1.2, 2.5, 0.0], [1.0, 4.0], [0.5]]
    assert deviation(values[:2], dim=1).tolist() == pytest.approx(list(map(statistics.stdev, known[:2])), rel=1e-14)
    found = deviation(values, dim=1, std="population").tolist()
    assert found == pytest.approx(list(map(statistics.pstdev, known)), rel=1e-14)


def test_group_max_of_negative_rewards() -> None:
    """The best of a bad group is still pushed *down*: its own reward is the delta (the lecture's rule, not a
    baseline)."""
    assert GroupMax()(torch.tensor([-2.0, -1.0]), 2).tolist() == [0.0, -1.0]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_group_with_one_or_no_scorable_completion(rule: str) -> None:
    found = applied(advantage_rule(rule), torch.tensor([2.0, NAN, NAN, NAN]), 2).tolist()
    assert found == [2.0 if rule in ("raw", "group_max") else 0.0, 0.0, 0.0, 0.0]


def test_dead_groups() -> None:
    grouped = torch.tensor([[1.0, 1.0], [1.0, 0.0], [NAN, 1.0], [NAN, NAN]])
    assert is_dead(grouped).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("rewards", "size", "message"),
    [
        (torch.zeros(5), 2, "5 rewards are not whole groups of num_generations=2"),
        (torch.zeros(4), 0, "num_generations=0"),
        (torch.zeros(2, 2), 2, r"float tensor \[N\], got \(2, 2\)"),
        (torch.zeros(4, dtype=torch.long), 2, "float tensor .* torch.int64"),
        (torch.tensor([1.0, math.inf]), 2, "infinite"),
    ],
)
def test_the_door(rewards: Tensor, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupMean()(rewards, size)


def test_names_at_the_door() -> None:
    with pytest.raises(ValueError, match=r"`advantage` is 'group_meen'; it must be one of .*group_mean"):
        advantage_rule("group_meen")
    with pytest.raises(ValueError, match=r"`advantage` .*Raw does not take .*epsilon"):
        advantage_rule("raw", epsilon=1e-6)
    allowed = r"`advantage\.std` is 'bessel'; it must be one of \['population', 'sample'\] \(n or n − 1 "
    with pytest.raises(ValueError, match=allowed):
        GroupZScore(std="bessel")


@pytest.mark.parametrize("rule", [GroupZScore, BatchZScore])
@pytest.mark.parametrize("epsilon", [-1e-4, math.nan, math.inf])
def test_an_epsilon_that_is_none_is_refused(rule: type[GroupZScore | BatchZScore], epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"`advantage\.epsilon`.*≥ 0"):
        rule(epsilon=epsilon)


def test_a_reward_table_is_float64_and_keeps_small_penalties() -> None:
    """Rewards of 1 less 0, 1e-9, 2e-9, 3e-9: float32 sees one number; mean 1.5e-9 is left exactly."""
    penalty = torch.tensor([[0.0], [-1e-9], [-2e-9], [-3e-9]], dtype=torch.float64)
    table = RewardTable(torch.cat([torch.ones(4, 1), penalty], dim=1), ("right", "kl"), torch.ones(2), 4, penalties=1)
    assert table.total.dtype == table.values.dtype == table.weights.dtype == torch.float64
    close(GroupMean()(table.total, 4), [1.5e-9, 0.5e-9, -0.5e-9, -1.5e-9], tolerance=1e-15)


def test_sums_of_rewards_have_the_resolution_of_float32() -> None:
    """0.1 + 0.2 and 0.3 + 0 are the same reward, as they are to TRL: a dead group, not an advantage of ±0.7 without
    ε."""
    table = RewardTable(torch.tensor([[0.1, 0.2], [0.3, 0.0]]), ("a", "b"), torch.ones(2), 2)
    assert is_dead(table.total.view(1, 2)).tolist() == [True]


@pytest.mark.parametrize("rule", ["group_mean", "group_zscore", "batch_zscore", "leave_one_out"])
def test_float32_rewards_lose_nothing_but_the_last_rounding(rule: str) -> None:
    rewards = 1 - 1e-4 * torch.rand(8, generator=torch.Generator().manual_seed(0))
    exact = advantage_rule(rule)(rewards.double(), 4)
    torch.testing.assert_close(advantage_rule(rule)(rewards, 4).double(), exact, rtol=2**-23, atol=0)
