"""Group rewards see whole groups wherever their rows lie: the same values on 1, 2 and 4 processes, on every rank.

In ``group-split`` a group lies on two ranks (2 processes) or no rank holds a whole one (4 processes, 3 rows each); in
``group-scattered`` each of 4 ranks holds a single row of the only group. The rows are the same in every world, so the
values must be equal to the last bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.cases import WORLDS
from distributed.launch import World
from grpo_lab.rewards import kimi_length_reward
from tolerance import two_walks

pytestmark = pytest.mark.slow
SPREAD = ("group-split", "group-scattered")
KIMI, TEAM = 1, 2  # columns of the reward table; 0 is the correctness
WEIGHT = 0.5


def tables(world: World, name: str) -> list[list[dict[str, Any]]]:
    """[rank][generation batch]."""
    return [rank["tables"] for rank in world.report(name)["ranks"]]


def local_rows(world: World, name: str) -> list[list[list[dict[str, Any]]]]:
    """[generation batch][rank][row]."""
    by_rank = [rank["local_rows"] for rank in world.report(name)["ranks"]]
    return [[rank[call] for rank in by_rank] for call in range(len(by_rank[0]))]


def kimi(rows: list[dict[str, Any]], weight: float) -> list[float | None]:
    """The formula over all of ``rows``, as a column of the table."""
    verdicts = [None if row["correct"] is None else row["correct"] == 1.0 for row in rows]
    values = kimi_length_reward([row["length"] for row in rows], verdicts)
    return [None if row["correct"] is None else weight * value for row, value in zip(rows, values, strict=True)]


def differing(values: list[float | None], table: list[float | None]) -> int:
    """How many entries are not the same number; the table is kept in float32 (entries of size 1 at most)."""
    return sum(
        value != pytest.approx(truth, abs=two_walks(torch.float32, 4))
        for value, truth in zip(values, table, strict=True)
    )


@pytest.mark.parametrize("name", SPREAD)
def test_identical_on_every_rank_of_every_world(name: str, worlds: dict[int, World]) -> None:
    (alone,) = tables(worlds[1], name)
    assert [table["names"] for table in alone] == [["accuracy_reward", "kimi_length_reward", "rare_and_right"]] * 4
    for processes in WORLDS:
        for rank, seen in enumerate(tables(worlds[processes], name)):
            assert seen == alone, f"rank {rank} of {processes}"


@pytest.mark.parametrize("name", SPREAD)
def test_the_runs_hold_what_they_claim(name: str, worlds: dict[int, World]) -> None:
    """Split groups, right, wrong and unscorable completions, weights of 0 (warm-up) and then 0.5, values of both
    signs."""
    for processes in (2, 4):
        for batch in local_rows(worlds[processes], name):
            sizes = [[row["number"] for row in rank].count(rank[-1]["number"]) for rank in batch]
            assert min(sizes) < 4, "some group is split"
            if processes == 4:
                assert max(sizes) < 4, "no rank holds a whole group"
    (alone,) = tables(worlds[1], name)
    correct = [row[0] for table in alone for row in table["values"]]
    assert {0.0, 1.0} <= set(correct)
    assert name != "group-split" or None in correct
    assert {row[KIMI] for row in alone[0]["values"]} <= {0.0, None}, "warm-up: one step without"
    later = [row[KIMI] for table in alone[1:] for row in table["values"] if row[KIMI] is not None]
    assert min(later) < 0.0 < max(later)
    assert len({row[TEAM] for table in alone for row in table["values"]}) > 4


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", SPREAD)
def test_the_local_list_form_gives_other_values_on_the_same_rows(
    name: str, processes: int, worlds: dict[int, World]
) -> None:
    """What public code computes on such rows: over a rank's piece of a group, or over all prompts of a rank's list."""
    batches = local_rows(worlds[processes], name)[1:]  # after the warm-up
    (alone,) = tables(worlds[1], name)
    pieces_differ = lists_differ = rows = 0
    for batch, table in zip(batches, alone[1:], strict=True):
        column = [row[KIMI] for row in table["values"]]
        flat = [row for rank in batch for row in rank]
        whole = [value for start in range(0, len(flat), 4) for value in kimi(flat[start : start + 4], WEIGHT)]
        assert differing(whole, column) == 0
        lists = [value for rank in batch for value in kimi(rank, WEIGHT)]
        pieces = [
            value
            for rank in batch
            for number in dict.fromkeys(row["number"] for row in rank)
            for value in kimi([row for row in rank if row["number"] == number], WEIGHT)
        ]
        rows += len(column)
        pieces_differ += differing(pieces, column)
        lists_differ += differing(lists, column)
    print(f"{name}, {processes} ranks: of {rows} rows {pieces_differ} differ by pieces, {lists_differ} by local lists")
    assert pieces_differ >= 3
    assert lists_differ >= 3


def test_stock_trl_refuses_split_groups_and_says_so(worlds: dict[int, World]) -> None:
    """In stock TRL the same object works while groups are whole, and otherwise raises, on every rank."""
    assert [rank["error"] for rank in worlds[1].report("stock-group-split")["ranks"]] == [None]
    for rank in worlds[2].report("stock-group-split")["ranks"]:
        assert "needs whole groups of num_generations=4" in rank["error"]
        assert "Use grpo_lab.LabTrainer" in rank["error"]


def test_stock_trl_agrees_while_groups_are_whole(worlds: dict[int, World]) -> None:
    name = "rewards/kimi_length_reward/mean"
    expected = [row[name] for row in worlds[1].steps("stock-group-whole")]
    assert any(expected)
    for processes in (1, 2):
        assert [rank["error"] for rank in worlds[processes].report("stock-group-whole")["ranks"]] == [None] * processes
        assert [row[name] for row in worlds[processes].steps("stock-group-whole")] == pytest.approx(
            expected,
            rel=0,
            abs=two_walks(torch.float32, 16),  # a mean of 16 values within [−0.25, 0.25]
        )
