"""Rules of level ``token``: told by an attribute, called on a table with this rank's rows; tables that selection puts
together anew."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from grpo_lab.advantages import GroupMean, Process, StepTable, advantage_rule, level_of, reads_steps, token_rule
from grpo_lab.batch import LocalRows, RewardTable
from grpo_lab.trainer.scoring.advantages import checked_advantages
from grpo_lab.trainer.scoring.carriers import Rewarded
from grpo_lab.trainer.scoring.resample import alike


def table(groups: int = 3, size: int = 2, steps: StepTable | None = None, seed: int = 0) -> RewardTable:
    values = torch.randn(groups * size, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    held = {} if steps is None else {0: steps}
    return RewardTable(values, ("a", "b"), torch.tensor([1.0, 0.5]), size, steps=held)


def ragged(rows: int, size: int, seed: int) -> StepTable:
    rng = random.Random(seed)
    found = [sorted(rng.sample(range(9), rng.randrange(0, 4))) for _ in range(rows)]
    return StepTable.of([[(end, rng.choice([0.0, 1.0, None])) for end in row] for row in found], size)


def as_lists(steps: StepTable) -> list[list[tuple[int, float | None]]]:
    found: list[list[tuple[int, float | None]]] = [[] for _ in range(steps.rows)]
    for row, end, score in zip(steps.row.tolist(), steps.end.tolist(), steps.score.tolist(), strict=True):
        found[row].append((end, None if score != score else score))
    return found


def test_the_level_is_an_attribute() -> None:
    @token_rule
    def mine(table: RewardTable) -> torch.Tensor:
        return table.total

    assert (level_of(mine), level_of(Process()), level_of(GroupMean()), level_of(lambda r, g: r)) == (
        *("token", "token", "row"),
        "row",
    )
    assert reads_steps(advantage_rule("process"))
    assert not reads_steps(mine)
    mine.level = "word"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"'word'.*row.*token"):
        level_of(mine)


def test_what_stands_on_tokens_without_loss_is_nobodys() -> None:
    """A rule that divides by a row's loss tokens has 0/0 where a completion was cut out of the loss."""
    mask = torch.tensor([[True, True], [False, False]])
    here = replace(table(1), local=LocalRows(slice(0, 2), mask, mask.sum(1)))
    answer = torch.tensor([[1.0, 2.0], [math.nan, math.inf]])
    assert checked_advantages(answer, here).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert not checked_advantages(torch.ones(2, requires_grad=True), here).requires_grad
    with pytest.raises(ValueError, match="finite: False"):
        checked_advantages(answer.flip(0), here)


def test_a_token_rule_needs_local_rows() -> None:
    with pytest.raises(ValueError, match="local"):
        Process()(table())


@pytest.mark.parametrize("seed", range(5))
def test_ranks_get_their_slices_of_one_answer(seed: int) -> None:
    """Whatever the widths of the ranks' batches: what rank r gets is rows of what a single process would get."""
    steps = ragged(6, 2, seed)
    whole = table(steps=steps, seed=seed)
    mask, lengths = torch.ones(6, 9, dtype=torch.bool), torch.full((6,), 9)
    everything = Process()(RewardTable(*_parts(whole), steps=whole.steps, local=LocalRows(slice(0, 6), mask, lengths)))
    for first in (0, 3):
        ends = steps.end[(steps.row >= first) & (steps.row < first + 3)]
        width = int(ends.max()) + 1 if ends.numel() else 1
        local = LocalRows(slice(first, first + 3), mask[:3, :width], lengths[:3])
        found = Process()(RewardTable(*_parts(whole), steps=whole.steps, local=local))
        assert torch.equal(found, everything[first : first + 3, :width])


def _parts(table: RewardTable) -> tuple[torch.Tensor, tuple[str, ...], torch.Tensor, int]:
    return table.values, table.names, table.weights, table.group_size


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_several_rounds(seed: int) -> None:
    """Joined and picked step tables against lists, rows without a step included."""
    rng = random.Random(seed)
    rounds = [ragged(rng.choice([2, 4]), 2, seed + 100 * i) for i in range(rng.randrange(1, 4))]
    lists = [row for steps in rounds for row in as_lists(steps)]
    groups = rng.sample(range(len(lists) // 2), rng.randrange(1, len(lists) // 2 + 1))
    index = [2 * group + i for group in groups for i in range(2)]
    joined = StepTable.joined(rounds)
    assert as_lists(joined) == lists
    assert as_lists(joined.picked(torch.tensor(index))) == [lists[row] for row in index]


def test_rewards_of_several_rounds() -> None:
    rounds = [
        Rewarded(table(steps=ragged(6, 2, s), seed=s), *(torch.arange(6) + 10 * s + k for k in range(4)))
        for s in (1, 2)
    ]
    index = torch.tensor([8, 9, 0, 1])
    found = Rewarded.joined(rounds).picked(index)
    assert torch.equal(found.table.values, torch.cat([r.table.values for r in rounds])[index])
    assert found.lengths.tolist() == [22, 23, 10, 11]
    assert found.rows.tolist() == [25, 26, 13, 14]
    both = [row for r in rounds for row in as_lists(r.table.steps[0])]
    assert as_lists(found.table.steps[0]) == [both[i] for i in index.tolist()]


def test_alike_is_of_outcomes_and_steps() -> None:
    """Groups: equal totals, differing totals, equal totals and differing steps."""
    values = torch.tensor([[9.0, 1.0], [8.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.5], [0.0, 0.5]])
    steps = StepTable.of([[(0, 1.0)], [(2, 1.0)], [(0, 1.0)], [], [(0, 1.0), (1, None)], [(0, 0.0)]], 2)
    held = RewardTable(values, ("steps", "right"), torch.ones(2), 2, steps={0: steps})
    assert alike(held).tolist() == [True, False, False]
    plain = RewardTable(values, ("a", "b"), torch.tensor([0.0, 1.0]), 2)
    assert alike(plain).tolist() == [True, False, True]
    only = RewardTable(values[:, :1], ("steps",), torch.ones(1), 2, steps={0: steps})
    assert alike(only).tolist() == [True, True, False]


def test_an_unscored_outcome_takes_no_part_beside_a_kl_penalty() -> None:
    """Steps were scored in every row, the outcome in rows 0, 1, 2 only: row 3 is no row of outcome 0.

    Outcomes 1, 1, 0, None less a penalty that does not matter (1e-12): mean 2/3, squares 2/9 + 4/9 = 2/3, std √(1/3).
    z = (1/3)/0.577350 = 0.577350, 0.577350, −1.154701, and 0 for row 3 (with 0 for None: 0.866, 0.866, −0.866, −0.866).
    """
    steps = StepTable.of([[(0, 0.5)]] * 4, 4)  # all alike: nothing but the outcome tells
    values = torch.tensor([[0.5, 1.0, -1e-12], [0.5, 1.0, -1e-12], [0.5, 0.0, -1e-12], [0.5, torch.nan, -1e-12]])
    local = LocalRows(slice(0, 4), torch.ones(4, 2, dtype=torch.bool), torch.full((4,), 2))
    weights = torch.ones(3)
    held = RewardTable(values, ("steps", "right", "kl"), weights, 4, penalties=1, steps={0: steps}, local=local)
    found = Process(epsilon=0.0)(held)
    one = 1 / math.sqrt(3)
    expected = torch.tensor([one, one, -2 * one, 0.0], dtype=torch.float64).unsqueeze(1).expand(4, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
