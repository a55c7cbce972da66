"""`keep_home`: rows stay where they are held as long as the step gets no longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.update import Plan, Rows, plan_update
from grpo_lab.update.balance import EVEN_ENOUGH


def at_home(plan: Plan, each: int) -> int:
    return sum(row // each == rank for rank, bins in enumerate(plan.bins) for one in bins for row in one)


def test_by_hand() -> None:
    """Two ranks that hold rows of 8 and 6 tokens each. By length the bins are 0, 2 | 1, 3; evening out 16 against 12
    live tokens swaps rows 0 and 1, so rows 2 and 0 are away. A round of 2 × 8 = 16 tokens has room for rows of up to 8
    on either rank: they change places, 8 + 6 live tokens on each as before, and the step still waits for 16."""
    rows = Rows([0] * 4, [8, 6, 8, 6], [True] * 4)
    plain, home = (plan_update(rows, 2, 16, keep_home=keep) for keep in (False, True))
    assert [sorted(bins[0]) for bins in plain.bins] == [[1, 2], [0, 3]]
    assert [bins[0] for bins in home.bins] == [[0, 1], [2, 3]]
    assert (at_home(plain, 2), at_home(home, 2)) == (2, 4)
    assert plain.step_tokens == home.step_tokens == 16
    assert home.live_per_rank == (14, 14)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 300), st.randoms(use_true_random=False))
def test_no_longer_and_never_fewer_at_home(ranks: int, each: int, budget: int, draw: object) -> None:
    count = ranks * each
    lengths = [draw.randint(1, 60) for _ in range(count)]  # type: ignore[attr-defined]
    rows = Rows([0] * count, lengths, [draw.random() < 0.7 for _ in range(count)])  # type: ignore[attr-defined]
    plain, home = (plan_update(rows, ranks, budget, keep_home=keep) for keep in (False, True))
    assert at_home(home, each) >= at_home(plain, each)
    assert home.step_tokens <= plain.step_tokens
    assert home.num_bins == plain.num_bins
    assert [[len(one) for one in bins] for bins in home.bins] == [[len(one) for one in bins] for bins in plain.bins]
    planned = [sorted(r for bins in plan.bins for one in bins for r in one) for plan in (plain, home)]
    assert planned[0] == planned[1]
    for bins in home.bins:
        for one in bins:
            assert len(one) <= 1 or len(one) * max(lengths[row] for row in one) <= budget
    mean = np.mean(home.live_per_rank)
    assert max(home.live_per_rank) <= max(EVEN_ENOUGH * mean, *plain.live_per_rank)


def test_ranks_must_hold_as_many_rows() -> None:
    with pytest.raises(ValueError, match="keep_home"):
        plan_update(Rows([1] * 3, [1] * 3, [True] * 3), 2, 10, keep_home=True)
