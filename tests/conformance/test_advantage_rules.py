"""What every advantage rule must do. A new rule costs one row in ``ROWS`` and is held to all of this."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import RULES, advantage_rule, level_of
from reference import oracle
from reference.cases import applied, some_lengths
from tolerance import two_walks

SIZE = 4


@dataclass(frozen=True)
class Row:
    """What is true of one rule.

    Args:
        dead_is_zero: a group of equal rewards gets exactly 0.
        shift: adding a constant to all rewards of a group changes nothing.
        scale: power of c by which advantages grow when all rewards are multiplied by c > 0 (with ε = 0 where there is
            one); None for a rule that asks whether a reward reaches a threshold.
        centred: advantages of a group sum to 0.
        own_group: other groups do not matter.
        ordered: a better reward never gets a smaller advantage than a worse one of the group.
        exact: settings under which ``scale`` holds exactly.
        negative: the rule takes negative rewards.
        knobs: settings of the rule in all of these tests.
    """

    dead_is_zero: bool = True
    shift: bool = True
    scale: int | None = 1
    centred: bool = True
    own_group: bool = True
    ordered: bool = True
    exact: tuple[tuple[str, Any], ...] = ()
    negative: bool = True
    knobs: tuple[tuple[str, Any], ...] = ()


ROWS: dict[str, Row] = {
    "raw": Row(dead_is_zero=False, shift=False, centred=False),
    "group_mean": Row(),
    "group_zscore": Row(scale=0, exact=(("epsilon", 0.0),)),
    "batch_zscore": Row(scale=0, own_group=False, exact=(("epsilon", 0.0),)),
    "leave_one_out": Row(),
    "group_max": Row(dead_is_zero=False, shift=False, centred=False, ordered=False),
    "maxrl": Row(shift=False, scale=0, exact=(("epsilon", 0.0),), negative=False),
    "pass_at_k": Row(shift=False, scale=None, knobs=(("k", 2), ("success", 0.5))),
    "passk_margin": Row(centred=False),
    "gdpo": Row(scale=0, own_group=False, exact=(("epsilon", 0.0),)),
    "opo": Row(centred=False),
    "reinforce_pp_baseline": Row(  # its mean is over tokens: it is not 0
        dead_is_zero=False, scale=0, centred=False, own_group=False, exact=(("epsilon", 0.0),)
    ),
}


def test_every_rule_has_a_row() -> None:
    assert ROWS.keys() == RULES.keys()


@pytest.fixture(params=sorted(ROWS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def row(name: str) -> Row:
    return ROWS[name]


@dataclass(frozen=True)
class Applied:
    """A rule of either level, called with rewards; ``lengths`` stay with their completions where rows are moved."""

    rule: Any

    def __call__(self, rewards: Tensor, size: int, lengths: Tensor | None = None) -> Tensor:
        return applied(self.rule, rewards, size, lengths)


@pytest.fixture
def rule(name: str, row: Row) -> Applied:
    return Applied(advantage_rule(name, **dict(row.knobs)))


def rewards(row: Row, groups: int = 5, seed: int = 0) -> Tensor:
    """Accuracy-like and real-valued groups, one dead. Sums of rewards have float32's resolution: multiples of 1/1024
    keep theirs when they are shifted."""
    random = torch.Generator().manual_seed(seed)
    values = (torch.randn(groups, SIZE, generator=random, dtype=torch.float64) * 1024).round() / 1024
    values[0] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    values[1] = 0.1
    return values.flatten() if row.negative else values.flatten().abs()


LENGTHS = torch.tensor(some_lengths(20)).view(-1, SIZE)


def test_shape_and_dtype(rule: Applied, row: Row) -> None:
    """Those of the rewards; a table's are float64."""
    for dtype in (torch.float32, torch.float64):
        found = rule(rewards(row).to(dtype), SIZE)
        assert found.shape == (20,)
        assert found.dtype == (dtype if level_of(rule.rule) == "row" else torch.float64)


def test_the_rewards_are_left_alone(rule: Applied, row: Row) -> None:
    values = rewards(row)
    values[3] = math.nan
    before = values.clone()
    rule(values, SIZE)
    assert torch.equal(values.isnan(), before.isnan())
    assert torch.equal(values.nan_to_num(), before.nan_to_num())


def test_agrees_with_the_oracle(name: str, rule: Applied, row: Row) -> None:
    values = rewards(row)
    if level_of(rule.rule) == "table":
        values = values.float().double()
    expected = oracle.advantages(name, values.tolist(), SIZE, lengths=some_lengths(20), **dict(row.knobs))
    assert rule(values, SIZE).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_permuting_the_group_permutes_the_advantages(rule: Applied, row: Row) -> None:
    values, order = rewards(row).view(-1, SIZE), torch.tensor([2, 0, 3, 1])
    found = rule(values[:, order].flatten(), SIZE, LENGTHS[:, order].flatten()).view(-1, SIZE)
    torch.testing.assert_close(found, rule(values.flatten(), SIZE).view(-1, SIZE)[:, order], rtol=1e-12, atol=1e-12)


def test_permuting_the_groups_permutes_the_advantages(rule: Applied, row: Row) -> None:
    values, order = rewards(row).view(-1, SIZE), torch.tensor([4, 2, 0, 1, 3])
    found = rule(values[order].flatten(), SIZE, LENGTHS[order].flatten()).view(-1, SIZE)
    torch.testing.assert_close(found, rule(values.flatten(), SIZE).view(-1, SIZE)[order], rtol=1e-12, atol=1e-12)


def test_whether_other_groups_matter(rule: Applied, row: Row) -> None:
    values = rewards(row)
    alone, together = rule(values[-SIZE:], SIZE, LENGTHS[-1]), rule(values, SIZE)[-SIZE:]
    assert torch.allclose(alone, together, rtol=1e-12, atol=1e-12) is row.own_group


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dead_group(rule: Applied, row: Row, dtype: torch.dtype) -> None:
    """Exactly 0, not nearly: rows are left out by this."""
    for value in (0.1, 1 / 3, -7.3 if row.negative else 7.3, 0.7, 1e5 / 7):  # six: the mean of six 0.1 is not 0.1
        found = rule(torch.tensor([value] * 6 + [0.0, 1.0] * 3, dtype=dtype), 6)[:6]
        assert bool((found == 0).all()) is row.dead_is_zero


def test_sum_over_the_group(rule: Applied, row: Row) -> None:
    sums = rule(rewards(row), SIZE).view(-1, SIZE).sum(1)
    assert bool((sums.abs() < 1e-11).all()) is row.centred


def test_adding_a_constant(rule: Applied, row: Row) -> None:
    values = rewards(row)
    live = (torch.arange(len(values)) // SIZE) != 1  # the dead group's rounding would be compared otherwise
    same = torch.allclose(rule(values + 3.0, SIZE)[live], rule(values, SIZE)[live], rtol=1e-10, atol=1e-10)
    assert same is row.shift


def test_multiplying_the_rewards(name: str, row: Row) -> None:
    if row.scale is None:
        return
    rule, values = Applied(advantage_rule(name, **dict(row.exact))), rewards(row)[2 * SIZE :]
    found = rule(values * 8.0, SIZE)  # a power of two: no rounding
    torch.testing.assert_close(found, rule(values, SIZE) * 8.0**row.scale, rtol=1e-12, atol=1e-12)


def test_better_rewards_get_larger_advantages(rule: Applied, row: Row) -> None:
    values = rewards(row).view(-1, SIZE)
    found = rule(values.flatten(), SIZE).view(-1, SIZE)
    order = values.argsort(dim=1, stable=True)
    if row.ordered:
        assert (found.gather(1, order).diff(dim=1) >= -1e-12).all()


def test_unscorable_rows_get_exactly_zero(rule: Applied, row: Row) -> None:
    values = rewards(row)
    values[[0, 5, 18, 19]] = math.nan
    found = rule(values, SIZE)
    assert found.isfinite().all()
    assert found[[0, 5, 18, 19]].tolist() == [0.0] * 4


def test_an_unscorable_row_is_as_if_it_were_not_there(rule: Applied, row: Row) -> None:
    values = rewards(row).view(-1, SIZE)
    holed = torch.cat([values, torch.full((len(values), 1), math.nan, dtype=torch.float64)], dim=1)
    lengths = torch.cat([LENGTHS, torch.full((len(values), 1), 9)], dim=1)
    found = rule(holed.flatten(), SIZE + 1, lengths.flatten()).view(-1, SIZE + 1)
    torch.testing.assert_close(found[:, :SIZE].flatten(), rule(values.flatten(), SIZE), rtol=1e-12, atol=1e-12)


def test_all_unscorable(rule: Applied) -> None:
    assert rule(torch.full((8,), math.nan), SIZE).tolist() == [0.0] * 8


def test_groups_of_one(rule: Applied) -> None:
    assert rule(torch.tensor([1.0, 2.0, math.nan]), 1).isfinite().all()


def test_no_rows(rule: Applied) -> None:
    assert rule(torch.zeros(0), SIZE).shape == (0,)


def test_float32_is_float64_rounded(rule: Applied, row: Row) -> None:
    """A difference keeps the roundings of what it is of, and a z-score divides them by the deviation of its group."""
    values, expected = rewards(row), rule(rewards(row), SIZE)
    spread = (
        values.view(-1, SIZE)[[0, 2, 3, 4]].std(1).min().item() if row.scale == 0 else 1.0
    )  # group 1 is dead: exactly 0
    largest = values.abs().max().item() / min(spread, 1.0) * max(expected.abs().max().item(), 1.0)
    bound = largest * two_walks(
        torch.float32, 4
    )  # rewards, mean and deviation of rounded rewards, the result: float64 in between
    torch.testing.assert_close(rule(values.float(), SIZE).double(), expected, rtol=0, atol=bound)


def test_large_offsets_keep_the_difference(rule: Applied, row: Row) -> None:
    """Rewards 1,000 and 1,001 differ by 1 in float32 too: sums of integers are exact in any order, so the differences
    are the same numbers, and what is done with them is done twice: the same bits on any CPU."""
    if row.shift and row.own_group:
        found = rule(torch.tensor([1000.0, 1001.0] * 2), SIZE)
        torch.testing.assert_close(found, rule(torch.tensor([0.0, 1.0] * 2), SIZE), rtol=0, atol=0)


@pytest.mark.parametrize(
    "bad", [torch.zeros(6), torch.zeros(4, 2), torch.zeros(8, dtype=torch.long), torch.full((8,), math.inf)]
)
def test_the_door(rule: Applied, bad: Tensor) -> None:
    if level_of(rule.rule) == "row" or bad.isinf().any():  # a table has a door of its own
        with pytest.raises(ValueError, match="reward"):
            rule(bad, SIZE)


def test_pickles_compares_and_says_where_it_comes_from(name: str) -> None:
    rule = advantage_rule(name)
    assert pickle.loads(pickle.dumps(rule)) == rule == advantage_rule(name)
    assert "Source:" in (type(rule).__doc__ or "")
