"""The plan of an optimizer step: properties, hand-computed examples, the brute-force optimum, and its time."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.update import Plan, Rows, default_max_tokens, plan_update
from grpo_lab.update.balance import EXACT_ROWS, assign_bins, cheapest_cuts, choose_cuts, footprints, rounds_cost

Row = tuple[int, int, bool]  # prompt tokens, completion tokens, live

row_lists = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.booleans()), max_size=60)
num_ranks_ = st.integers(1, 9)
budgets = st.integers(1, 600)
overheads = st.sampled_from([0, 1, 64, 10_000])


def over_mean(per_rank: tuple[int, ...]) -> float:
    """The fullest rank over the mean of all ranks; 1 where there is nothing."""
    total = sum(per_rank)
    return max(per_rank) * len(per_rank) / total if total else 1.0


def as_rows(rows: list[Row]) -> Rows:
    return Rows([p for p, _, _ in rows], [c for _, c, _ in rows], [live for _, _, live in rows])


def all_live(totals: list[int]) -> Rows:
    return Rows([0] * len(totals), totals, [True] * len(totals))


def contents(plan: Plan, rows: list[Row]) -> list[list[list[tuple[int, int]]]]:
    """The plan with every index replaced by the row's lengths."""
    return [[sorted(rows[i][:2] for i in one) for one in bins] for bins in plan.bins]


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.not_fast
@settings(max_examples=300, deadline=None)
@given(row_lists, num_ranks_, budgets, overheads)
def test_every_live_row_once_no_dead_row_budget_kept_and_equal_bin_counts(
    rows: list[Row], num_ranks: int, budget: int, overhead: int
) -> None:
    plan = plan_update(as_rows(rows), num_ranks, budget, overhead_tokens=overhead)
    total = [p + c for p, c, _ in rows]
    planned = sorted(i for bins in plan.bins for one in bins for i in one)
    assert planned == [i for i, row in enumerate(rows) if row[2]]
    assert len(plan.bins) == num_ranks
    assert {len(bins) for bins in plan.bins} == {len(plan.bins[0])}
    assert len(plan.bins[0]) >= 1
    for bins in plan.bins:
        for one in bins:
            assert len(one) <= 1 or len(one) * max(total[i] for i in one) <= budget
            assert [total[i] for i in one] == sorted((total[i] for i in one), reverse=True)
    # no round in which every rank would run a dummy row, unless nothing is live at all
    assert not planned or all(any(bins[k] for bins in plan.bins) for k in range(len(plan.bins[0])))


@pytest.mark.not_fast
@settings(max_examples=150, deadline=None)
@given(row_lists, num_ranks_, budgets)
def test_reported_numbers_are_those_of_the_bins(rows: list[Row], num_ranks: int, budget: int) -> None:
    plan = plan_update(as_rows(rows), num_ranks, budget)
    total = [p + c for p, c, _ in rows]
    tokens = [[len(one) * max((total[i] for i in one), default=0) for one in bins] for bins in plan.bins]
    live = [sum(total[i] for one in bins for i in one) for bins in plan.bins]
    assert plan.tokens_computed == sum(map(sum, tokens))
    assert plan.tokens_live == sum(live) == sum(p + c for p, c, alive in rows if alive)
    assert plan.step_tokens == sum(max(column) for column in zip(*tokens, strict=True))
    assert plan.live_per_rank == tuple(live)
    assert plan.computed_per_rank == tuple(map(sum, tokens))
    assert plan.padding_share == pytest.approx(1 - sum(live) / plan.tokens_computed if sum(live) else 0.0)


@pytest.mark.not_fast
@settings(max_examples=150, deadline=None)
@given(row_lists, num_ranks_, budgets, st.randoms(use_true_random=False))
def test_permuting_the_rows_permutes_the_plan(rows: list[Row], num_ranks: int, budget: int, random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, again, other = (plan_update(as_rows(r), num_ranks, budget) for r in (rows, rows, shuffled))
    assert first.bins == again.bins
    assert contents(first, rows) == contents(other, shuffled)


def test_lists_tensors_and_arrays_give_the_same_plan() -> None:
    prompt, completion, live = [3, 9, 4, 7, 7], [5, 1, 8, 20, 2], [True, True, False, True, True]
    kinds = (
        Rows(prompt, completion, live),
        Rows(torch.tensor(prompt), torch.tensor(completion), torch.tensor(live)),
        Rows(np.array(prompt, dtype=np.int32), torch.tensor(completion), np.array(live)),
    )
    assert len({str(plan_update(rows, 2, 40).bins) for rows in kinds}) == 1


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("totals", "ranks", "budget", "overhead", "bins", "step_tokens"),
    [
        # Totals 10, 9, 4, 4, 3 (live 30), budget 20, one bin costs 2 tokens.
        #   {10, 9}: 2 × 10 = 20, + 2 = 22   against {10} {9}: 10 + 9 + 4 = 23
        #   {4, 4, 3}: 3 × 4 = 12, + 2 = 14  against {4, 4} {3}: 8 + 3 + 4 = 15
        # {10, 9, 4} would be 3 × 10 = 30 > 20. So two bins, 32 tokens computed, 2 of them padding.
        ([4, 10, 3, 4, 9], 1, 20, 2, [[[1, 4], [0, 3, 2]]], 32),
        # free bins: rows of different length never share one, 10 + 9 + 2 × 4 + 3 = 30; equal ones may
        ([4, 10, 3, 4, 9], 1, 20, 0, [[[1], [4], [0, 3], [2]]], 30),
        # Rank 0 gets 2 × 6 = 12, rank 1 gets 4 × 3 = 12. Three rows each would cost {6, 6, 3} = 18 against
        # {3, 3, 3} = 9, and dealing the rows out in turn {6, 3, 3} = 18 on both.
        ([6, 3, 3, 6, 3, 3], 2, 100, None, [[[0, 3]], [[1, 2, 4, 5]]], 12),
        # equal rows: the table's first go to the first rank
        ([5, 5, 5, 5], 2, 100, None, [[[0, 1]], [[2, 3]]], 10),
        # a row longer than the budget has a bin by itself
        ([50, 4, 4, 4], 1, 12, None, [[[0], [1, 2, 3]]], 62),
        ([50, 4, 4, 4], 2, 12, None, [[[0]], [[1, 2, 3]]], 50),
    ],
)
def test_by_hand(
    totals: list[int], ranks: int, budget: int, overhead: int | None, bins: list[list[list[int]]], step_tokens: int
) -> None:
    plan = plan_update(all_live(totals), ranks, budget, **({} if overhead is None else {"overhead_tokens": overhead}))
    assert plan.bins == bins
    assert (plan.tokens_live, plan.step_tokens) == (sum(totals), step_tokens)
    computed = sum(len(one) * max(totals[row] for row in one) for ones in bins for one in ones)
    assert plan.tokens_computed == computed
    assert plan.padding_share == pytest.approx(1 - sum(totals) / computed)


@pytest.mark.parametrize(
    ("totals", "budget", "live_per_rank", "step_tokens"),
    [
        # One round. The cuts {10, 7} {7, 4} cost 20 and 14; no cut has a smaller maximum ({10} {7, 7, 4}: 21;
        # {10, 7, 7} {4}: 30). Live 17 against 11. The second bin idles for 20 - 14 = 6, so it may hold two rows of up
        # to 20 / 2 = 10. Swapping a 7 for the 4 leaves {10, 4} = 20 and {7, 7} = 14: live 14 and 14.
        ([10, 7, 7, 4], 100, (14, 14), 20),
        # Budget 12 = two rows of 6 or four of 3: 2 + 2 bins, all of 12 tokens, two rounds of 12. A round that paired a
        # full bin with a half-empty one would wait.
        ([6] * 4 + [3] * 8, 12, (24, 24), 24),
    ],
    ids=["swaps even out live tokens", "like bins run together"],
)
def test_two_ranks_by_hand(totals: list[int], budget: int, live_per_rank: tuple[int, int], step_tokens: int) -> None:
    plan = plan_update(all_live(totals), 2, budget)
    assert (plan.live_per_rank, plan.step_tokens) == (live_per_rank, step_tokens)


def test_the_lighter_rank_gets_the_fuller_bin_by_hand() -> None:
    # Bins {6, 6} {6, 5} {4, 4} {4, 3}: footprints 12 12 | 8 8, live 12 11 | 8 7. After the first round rank 0 has 12,
    # rank 1 has 11; the second round's 8 goes to rank 1 and its 7 to rank 0: 19 each (in the same order again: 20 and
    # 18).
    rounds, ranks = assign_bins(np.array([6, 6, 6, 5, 4, 4, 4, 3]), np.array([0, 2, 4, 6]), 2)
    assert rounds.tolist() == [0, 0, 1, 1]
    assert ranks.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("rows", [[], [(5, 5, False)], [(5, 5, False)] * 40])
def test_nothing_live_is_one_empty_bin_on_every_rank(rows: list[Row]) -> None:
    plan = plan_update(as_rows(rows), 4, 100)
    assert plan.bins == [[[]]] * 4
    assert (plan.tokens_live, plan.tokens_computed, plan.step_tokens) == (0, 0, 0)
    assert (plan.padding_share, over_mean(plan.live_per_rank), over_mean(plan.computed_per_rank)) == (0.0, 1.0, 1.0)


def test_one_live_row_leaves_the_other_ranks_an_empty_bin() -> None:
    plan = plan_update(as_rows([(5, 5, False), (3, 4, True), (5, 5, False)]), 4, 100)
    assert plan.bins == [[[1]], [[]], [[]], [[]]]
    assert (
        over_mean(plan.live_per_rank) == 4
    )  # 7 tokens on one rank against 7 / 4 on average: nothing can even that out


def test_a_rank_whose_own_rows_are_all_dead_gets_rows_of_the_others() -> None:
    # rank 0 generated rows 0–7 (dead), rank 1 rows 8–15 (live): stock leaves rank 0 with nothing but zeros
    rows = [(10, 10, False)] * 8 + [(10, 10, True)] * 8
    plan = plan_update(as_rows(rows), 2, default_max_tokens(4, 10, 10))
    assert plan.live_per_rank == (80, 80)
    assert plan.bins == [[[8, 9, 10, 11]], [[12, 13, 14, 15]]]


# --- the optimum -----------------------------------------------------------------------------------------------------


def partitions(items: list[int]) -> list[list[list[int]]]:
    """All ways to cut a list into non-empty sets, contiguous or not."""
    if not items:
        return [[]]
    head, rest = items[0], partitions(items[1:])
    return [
        option
        for one in rest
        for option in ([[head], *one], *([*one[:k], [head, *one[k]], *one[k + 1 :]] for k in range(len(one))))
    ]


def cheapest_by_force(totals: list[int], num_ranks: int, budget: int, overhead: int) -> tuple[int, int]:
    """(cost, rounds) of the best of all set partitions. Bins of like size share a round: no other pairing is
    cheaper."""
    best: tuple[int, int] | None = None
    for bins in partitions(totals):
        if any(len(one) > 1 and len(one) * max(one) > budget for one in bins):
            continue
        rounds = -(-len(bins) // num_ranks)
        cost = rounds_cost(np.array([len(one) * max(one) for one in bins]), num_ranks, overhead)
        best = min(best, (cost, rounds)) if best else (cost, rounds)
    assert best is not None
    return best


totals_ = st.lists(st.integers(1, 30), min_size=1, max_size=7)


@pytest.mark.not_fast
@settings(max_examples=150, deadline=None)
@given(totals_, st.integers(1, 90), st.sampled_from([0, 1, 5, 1000]))
def test_one_rank_is_the_optimum_over_all_partitions(totals: list[int], budget: int, overhead: int) -> None:
    plan = plan_update(all_live(totals), 1, budget, overhead_tokens=overhead)
    assert plan.step_tokens + overhead * len(plan.bins[0]) == cheapest_by_force(totals, 1, budget, overhead)[0]


@pytest.mark.not_fast
@settings(max_examples=150, deadline=None)
@given(totals_, st.integers(2, 4), st.integers(1, 90), st.sampled_from([0, 1, 5, 1000]))
def test_several_ranks_are_the_optimum_in_one_round_and_near_it_in_more(
    totals: list[int], num_ranks: int, budget: int, overhead: int
) -> None:
    plan = plan_update(all_live(totals), num_ranks, budget, overhead_tokens=overhead)
    cost = plan.step_tokens + overhead * len(plan.bins[0])
    optimum, rounds = cheapest_by_force(totals, num_ranks, budget, overhead)
    assert cost >= optimum
    assert cost <= 1.5 * optimum
    if rounds == 1:
        assert cost == optimum


@pytest.mark.not_fast
def test_several_ranks_are_on_average_within_three_percent_of_the_optimum() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(150):
        totals = rng.integers(5, 60, rng.integers(3, 8)).tolist()
        num_ranks, budget = int(rng.integers(2, 4)), int(rng.integers(60, 200))
        plan = plan_update(all_live(totals), num_ranks, budget, overhead_tokens=3)
        ratios.append((plan.step_tokens + 3 * len(plan.bins[0])) / cheapest_by_force(totals, num_ranks, budget, 3)[0])
    assert np.mean(ratios) <= 1.03


def test_beyond_the_exact_size_one_rank_loses_almost_nothing() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(50, 500, EXACT_ROWS + 1000))[::-1].copy()
    cut = footprints(lengths, choose_cuts(lengths, 1, 4000, 64))
    exact = footprints(lengths, cheapest_cuts(lengths, 4000, 64))
    assert rounds_cost(cut, 1, 64) <= 1.01 * rounds_cost(exact, 1, 64)


# --- balance and time ------------------------------------------------------------------------------------------------


def realistic(num_rows: int, dead: float, seed: int = 0) -> tuple[Rows, int]:
    """Log-normal lengths with the mean and spread of GSM8K model outputs (62 ± 22 and 125 ± 63 tokens), groups of 8."""
    rng = np.random.default_rng(seed)
    groups = num_rows // 8
    prompt = np.repeat(rng.lognormal(4.06, 0.35, groups).astype(np.int64) + 1, 8)
    completion = np.minimum(rng.lognormal(4.72, 0.47, num_rows).astype(np.int64) + 1, 512)
    live = np.repeat(rng.permutation(groups) >= round(groups * dead), 8)
    return Rows(prompt, completion, live), default_max_tokens(8, int(prompt.max()), int(completion.max()))


@pytest.mark.parametrize("dead", [0.0, 0.3, 0.62])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_ranks_are_even(num_ranks: int, dead: float) -> None:
    rows, budget = realistic(64 * num_ranks, dead)
    plan = plan_update(rows, num_ranks, budget)
    assert over_mean(plan.live_per_rank) <= 1.05
    assert over_mean(plan.computed_per_rank) <= 1.05
    assert plan.step_tokens * num_ranks <= 1.12 * plan.tokens_live


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "dead", "max_tokens", "num_ranks"),
    [
        (100_000, 0.0, None, 512), (100_000, 0.62, None, 512), (100_000, 0.9, None, 512), (100_000, 0.0, 600, 512),
        (10_000, 0.3, None, 512), (100_000, 0.0, 1, 512), (100_000, 0.0, 1, 2), (100_000, 0.0, 1, 1),
    ],
)  # fmt: skip
def test_planning_takes_less_than_a_second(num_rows: int, dead: float, max_tokens: int | None, num_ranks: int) -> None:
    # measured 0.1–0.4 s on one core of a shared 2-core machine; the claim is 1 s, the test leaves room for a busy
    # machine. A budget of 1 token gives every row a bin of its own, the most bins there can be.
    rows, budget = realistic(num_rows // 8 * 8, dead)
    start = time.process_time()
    plan = plan_update(rows, num_ranks, max_tokens or budget)
    assert time.process_time() - start < 3.0
    assert sum(map(len, (one for bins in plan.bins for one in bins))) == int(np.sum(rows.live))


# --- the door --------------------------------------------------------------------------------------------------------


def test_default_max_tokens_is_the_stock_footprint() -> None:
    assert default_max_tokens(8, 120, 512) == 8 * 632
    for bad in ((0, 1, 1), (1, -1, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match="≥"):
            default_max_tokens(*bad)


@pytest.mark.parametrize(
    ("prompt", "completion", "live", "message"),
    [
        ([1, 2], [1], [True, True], "2, 1 and 2"),
        ([1.5], [1], [True], "whole numbers"),
        ([-1], [1], [True], "≥ 0 tokens"),
        ([1], [1], [1], "list of bool"),
        ([[1]], [1], [True], "shape"),
        ([3, 0], [3, 0], [True, True], "Row 1 is live but has no token"),
    ],
)
def test_bad_tables_are_refused(prompt: list, completion: list, live: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rows(prompt, completion, live)


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens", "overhead"), [(0, 10, 0), (1, 0, 0), (1, 10, -1), (1, 10.5, 0), (True, 10, 0)]
)
def test_bad_sizes_are_refused(num_ranks: int, max_tokens: int, overhead: int) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        plan_update(all_live([1]), num_ranks, max_tokens, overhead_tokens=overhead)
