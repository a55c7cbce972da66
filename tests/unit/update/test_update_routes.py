"""Which rows leave their rank, by hand and as properties; what the messages at both ends agree on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.update import Plan, Routes, Rows, plan_update


def test_by_hand() -> None:
    """Two ranks of three rows. Rank 0 computes its row 0 with row 4 of rank 1, and nothing second; rank 1 computes row
    2 of rank 0, then its own row 5. So row 4 travels to rank 0, as wide as the longer completion of its bin (7), and
    row 2 to rank 1."""
    plan = Plan([[[4, 0], []], [[2], [5]]], 0, 0, 0, (0, 0), (0, 0))
    routes = Routes.of(plan, np.array([7, 9, 3, 9, 4, 0]), rows_per_rank=3)
    assert routes.rows.tolist() == [0, 2, 4, 5]
    assert routes.homes.tolist() == [0, 0, 1, 1]
    assert routes.ranks.tolist() == [0, 1, 0, 1]
    assert routes.widths.tolist() == [7, 3, 7, 1]  # an empty completion is one token wide
    assert routes.moves.tolist() == [False, True, True, False]
    assert routes.leaving(0).rows.tolist() == routes.arriving(1).rows.tolist() == [2]
    assert routes.leaving(1).rows.tolist() == routes.arriving(0).rows.tolist() == [4]


def test_nothing_planned() -> None:
    routes = Routes.of(Plan([[[]], [[]]], 0, 0, 0, (0, 0), (0, 0)), np.array([1, 2]), rows_per_rank=1)
    assert not routes.moves.any()
    assert routes.leaving(0).rows.size == routes.arriving(1).rows.size == 0


@pytest.mark.not_fast
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 300), st.randoms(use_true_random=False))
def test_both_ends_agree_and_every_planned_row_is_somewhere_once(
    ranks: int, each: int, budget: int, draw: object
) -> None:
    count = ranks * each
    completions = [draw.randint(0, 40) for _ in range(count)]  # type: ignore[attr-defined]
    live = [draw.random() < 0.7 for _ in range(count)]  # type: ignore[attr-defined]
    plan = plan_update(Rows([3] * count, completions, live), ranks, budget)
    routes = Routes.of(plan, np.array(completions), each)
    assert routes.rows.tolist() == [row for row in range(count) if live[row]]
    assert routes.homes.tolist() == [row // each for row in routes.rows.tolist()]
    for rank in range(ranks):
        out, into = routes.leaving(rank), routes.arriving(rank)
        assert sorted(out.ranks.tolist()) == out.ranks.tolist()
        assert sorted(into.homes.tolist()) == into.homes.tolist()
        planned = {row for one in plan.bins[rank] for row in one}
        assert planned == set(into.rows.tolist()) | {r for r in planned if r // each == rank}
        for other in range(ranks):
            there, here = routes.leaving(other), into
            assert there.rows[there.ranks == rank].tolist() == here.rows[here.homes == other].tolist()
