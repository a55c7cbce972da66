"""Advantage rules: hand values. Properties that all rules share are in
``tests/conformance/test_advantage_rules.py``."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import (
    RULES,
    BatchZScore,
    GroupMax,
    GroupMean,
    GroupZScore,
    LeaveOneOut,
    Raw,
    advantage_rule,
)
from grpo_lab.advantages.group import deviation, group_average, is_dead
from grpo_lab.batch import RewardTable

NAN = math.nan
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 1.0, 3.0], dtype=torch.float64)  # two groups of four


def close(found: Tensor, expected: list[float], tolerance: float = 1e-12) -> None:
    assert found.tolist() == pytest.approx(expected, abs=tolerance)


def test_raw() -> None:
    assert Raw()(REWARDS, 4).tolist() == REWARDS.tolist()


def test_group_mean() -> None:
    # means 1/4 and 8/4 = 2
    close(GroupMean()(REWARDS, 4), [0.75, -0.25, -0.25, -0.25, 1, -1, -1, 1])


def test_group_zscore() -> None:
    # group 1: deviations ¾, −¼, −¼, −¼; Σ² = 9/16 + 3/16 = ¾; variance ¾/3 = ¼; std ½
    # group 2: deviations ±1; Σ² = 4; variance 4/3; std 2/√3
    first, second = 0.5 + 1e-4, 2 / math.sqrt(3) + 1e-4
    expected = [0.75 / first] + [-0.25 / first] * 3 + [1 / second, -1 / second, -1 / second, 1 / second]
    close(GroupZScore()(REWARDS, 4), expected)


def test_population_standard_deviation() -> None:
    # group 1: Σ² = ¾, n = 4: variance 3/16, std √3/4; group 2: Σ² = 4, variance 1, std 1
    first = math.sqrt(3) / 4 + 1e-4
    expected = [0.75 / first] + [-0.25 / first] * 3 + [value / (1 + 1e-4) for value in (1, -1, -1, 1)]
    close(GroupZScore(std="population")(REWARDS, 4), expected)
    # the batch: Σ(r − m)² = 87/8, n = 8: variance 87/64, std √87/8
    std = math.sqrt(87) / 8 + 1e-4
    close(BatchZScore(std="population")(REWARDS, 4), [v / std for v in (0.75, -0.25, -0.25, -0.25, 1, -1, -1, 1)])
    with pytest.raises(
        ValueError, match=r"`advantage\.std` is 'bessel'; it must be one of \['population', 'sample'\] \(n or n − 1 "
    ):
        GroupZScore(std="bessel")


def test_population_std_is_the_standard_librarys() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0, NAN], [0.5, NAN, NAN, NAN]], dtype=torch.float64)
    expected = [statistics.pstdev([1.0, 2.0, 4.0]), 0.0]
    assert deviation(values, dim=1, std="population").tolist() == pytest.approx(expected, rel=1e-14)


def test_group_zscore_epsilon_is_added_to_the_deviation_not_to_the_variance() -> None:
    # ε = ½: 0.75/(½ + ½) = 0.75
    close(GroupZScore(epsilon=0.5)(REWARDS[:4], 4), [0.75, -0.25, -0.25, -0.25])


def test_batch_zscore() -> None:
    # batch mean 9/8; Σr² = 1 + 9 + 1 + 1 + 9 = 21; Σ(r − m)² = 21 − 81/8 = 87/8; variance (87/8)/7 = 87/56
    std = math.sqrt(87 / 56) + 1e-4
    close(BatchZScore()(REWARDS, 4), [value / std for value in (0.75, -0.25, -0.25, -0.25, 1, -1, -1, 1)])


def test_leave_one_out() -> None:
    # 1 − 0; 0 − 1/3 three times; 3 − 5/3, 1 − 7/3, …
    close(LeaveOneOut()(REWARDS, 4), [1, -1 / 3, -1 / 3, -1 / 3, 4 / 3, -4 / 3, -4 / 3, 4 / 3])


def test_leave_one_out_is_group_mean_stretched() -> None:
    """r_i − mean of the others = (r_i − mean)·n/(n − 1)."""
    close(LeaveOneOut()(REWARDS, 4), (GroupMean()(REWARDS, 4) * 4 / 3).tolist())


def test_group_max_keeps_ties() -> None:
    assert GroupMax()(REWARDS, 4).tolist() == [1, 0, 0, 0, 3, 0, 0, 3]


def test_group_max_of_negative_rewards() -> None:
    """The best of a bad group is still pushed *down*: its own reward is the delta (the lecture's rule, not a
    baseline)."""
    assert GroupMax()(torch.tensor([-2.0, -1.0]), 2).tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("raw", [1.0, 0.0, 0.0]),
        ("group_mean", [0.5, 0.0, -0.5]),  # mean of {1, 0} = ½
        ("group_zscore", [0.5 / (math.sqrt(0.5) + 1e-4), 0.0, -0.5 / (math.sqrt(0.5) + 1e-4)]),  # Σ² = ½, n − 1 = 1
        ("batch_zscore", [0.5 / (math.sqrt(0.5) + 1e-4), 0.0, -0.5 / (math.sqrt(0.5) + 1e-4)]),
        ("leave_one_out", [1.0, 0.0, -1.0]),  # the only other scorable one
        ("group_max", [1.0, 0.0, 0.0]),
    ],
)
def test_an_unscorable_completion_takes_no_part(rule: str, expected: list[float]) -> None:
    close(advantage_rule(rule)(torch.tensor([1.0, NAN, 0.0], dtype=torch.float64), 3), expected)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_group_with_one_or_no_scorable_completion(rule: str) -> None:
    found = advantage_rule(rule)(torch.tensor([2.0, NAN, NAN, NAN]), 2).tolist()
    assert found == [2.0 if rule in ("raw", "group_max") else 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, -1e-3, 1e5 / 7])
@pytest.mark.parametrize("rule", ["group_mean", "group_zscore", "batch_zscore", "leave_one_out"])
def test_a_dead_group_is_exactly_zero(rule: str, value: float, dtype: torch.dtype) -> None:
    """Equal rewards whose mean rounds to something else: 0 by formula, so 0 exactly (rows are skipped by it)."""
    rewards = torch.tensor([value] * 6 + [0.0, 1.0] * 3, dtype=dtype)
    assert advantage_rule(rule)(rewards, 6)[:6].tolist() == [0.0] * 6


def test_the_plain_mean_would_not_be() -> None:
    """The reason for ``group_average``: in float64 the mean of six times 0.1 is not 0.1."""
    group = torch.full((1, 6), 0.1, dtype=torch.float64)
    assert (group - group.mean(dim=1, keepdim=True)).abs().max() > 0
    assert (group - group_average(group)).abs().max() == 0


def test_dead_groups() -> None:
    grouped = torch.tensor([[1.0, 1.0], [1.0, 0.0], [NAN, 1.0], [NAN, NAN]])
    assert is_dead(grouped).tolist() == [True, False, True, True]


def test_sample_std_is_the_standard_librarys() -> None:
    values = torch.tensor([[0.3, -1.2, 2.5, 0.0], [1.0, NAN, 4.0, NAN]], dtype=torch.float64)
    expected = [statistics.stdev([0.3, -1.2, 2.5, 0.0]), statistics.stdev([1.0, 4.0])]
    assert deviation(values, dim=1).tolist() == pytest.approx(expected, rel=1e-14)


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
