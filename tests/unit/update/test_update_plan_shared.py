"""Plans whose prompts are computed once: nothing lost or doubled, the budget, even ranks, the cheaper of two plans."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from grpo_lab.update import Plan, Rows, cheaper, plan_shared, plan_update
from grpo_lab.update.shared_plan import _cuts

CASES = range(60)


def step(seed: int) -> tuple[Rows, np.ndarray, random.Random]:
    """Groups of 1 to 8 rows in random order, some dead; prompts numbered as hashes are, negative ones too."""
    draw = random.Random(seed)
    groups = [(draw.randint(1, 60), draw.randint(1, 8)) for _ in range(draw.randint(1, 9))]
    table = [(p, draw.randint(1, 40), number * 7919 - 20000) for number, (p, g) in enumerate(groups) for _ in range(g)]
    draw.shuffle(table)
    prompt, completion, names = (np.asarray(column) for column in zip(*table, strict=True))
    live = np.asarray([draw.random() < 0.7 for _ in table])
    return Rows(prompt, completion, live), names, draw


def tokens_of(rows: Rows, names: Any, places: list[int]) -> int:
    """What a packed row holds: each prompt once, and every completion."""
    prompts = {int(names[place]): int(rows.prompt_lengths[place]) for place in places}
    return sum(prompts.values()) + sum(int(rows.completion_lengths[place]) for place in places)


@pytest.mark.parametrize("seed", CASES)
def test_every_live_row_once_within_the_budget(seed: int) -> None:
    rows, names, draw = step(seed)
    ranks, budget = draw.choice((1, 2, 3)), draw.choice((30, 120, 400, 10_000))
    plan = plan_shared(rows, names, ranks, budget)
    held = sorted(place for rank in plan.bins for places in rank for place in places)
    assert held == np.flatnonzero(rows.live).tolist()
    assert len({len(rank) for rank in plan.bins}) == 1
    assert plan.shared
    packed = [(places, tokens_of(rows, names, places)) for rank in plan.bins for places in rank]
    assert all(size <= budget or len(places) == 1 for places, size in packed)
    # the plan counts a prompt once a part of its group: never less than what is packed
    assert plan.tokens_computed >= sum(size for _, size in packed)
    assert plan.computed_per_rank == plan.live_per_rank
    assert sum(plan.live_per_rank) == plan.tokens_live == plan.tokens_computed
    assert plan.step_tokens >= plan.tokens_computed / ranks


def test_a_prompt_costs_once_a_bin() -> None:
    # two groups of 10 + (4, 3, 2, 1) and 20 + (5, 5): 10 + 10 + 20 + 10 = 50 tokens; unshared 50 + 50 = 100 and more
    rows = Rows([10] * 4 + [20] * 2, [4, 3, 2, 1, 5, 5], [True] * 6)
    plan = plan_shared(rows, [1, 1, 1, 1, 2, 2], 1, 1000)
    assert plan.tokens_computed == plan.step_tokens == 50
    assert [sorted(places) for places in plan.bins[0]] == [[0, 1, 2, 3, 4, 5]]
    # 30 tokens a bin: each group alone; 25: the second group takes its prompt into both parts, 10 + 10 and 20 + 5 twice
    assert plan_shared(rows, [1, 1, 1, 1, 2, 2], 1, 30).tokens_computed == 50
    cut = plan_shared(rows, [1, 1, 1, 1, 2, 2], 1, 25)
    assert cut.tokens_computed == 70
    assert sorted(map(sorted, cut.bins[0])) == [[0, 1, 2, 3], [4], [5]]


@pytest.mark.parametrize("seed", range(15))
def test_the_order_of_rows_decides_nothing_that_is_paid(seed: int) -> None:
    rows, names, draw = step(seed)
    order = np.asarray(draw.sample(range(len(names)), len(names)))
    mixed = Rows(rows.prompt_lengths[order], rows.completion_lengths[order], rows.live[order])
    one, other = (plan_shared(r, n, 2, 200) for r, n in ((rows, names), (mixed, names[order])))
    assert (one.tokens_computed, one.step_tokens, len(one.bins[0])) == (
        other.tokens_computed, other.step_tokens, len(other.bins[0]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_bin_is_the_smallest_that_so_few_rounds_allow(seed: int) -> None:
    """Brute force over contiguous cuts of parts of at most ``budget`` tokens (a longer one has a bin by itself)."""
    draw = random.Random(seed)
    tokens, budget, ranks = [draw.randint(1, 60) for _ in range(draw.randint(1, 9))], draw.choice((40, 90, 200)), 2
    starts = _cuts(np.asarray(tokens), ranks, budget).tolist()
    bins = [tokens[a:b] for a, b in pairwise([*starts, len(tokens)])]
    every = [
        [tokens[a:b] for a, b in pairwise([0, *cuts, len(tokens)])]
        for n in range(len(tokens))
        for cuts in combinations(range(1, len(tokens)), n)
    ]
    allowed = [one for one in every if all(sum(held) <= budget or len(held) == 1 for held in one)]
    rounds = min(-(-len(one) // ranks) for one in allowed)
    assert -(-len(bins) // ranks) == rounds
    assert max(map(sum, bins)) == min(max(map(sum, one)) for one in allowed if len(one) <= rounds * ranks)


def test_live_tokens_of_ranks_are_even() -> None:
    """32 groups of 8 with like prompts: the heavier of two ranks has at most a group more than the other."""
    draw = random.Random(0)
    table = [(50, draw.randint(5, 30), group) for group in range(32) for _ in range(8)]
    prompt, completion, names = zip(*table, strict=True)
    plan = plan_shared(Rows(prompt, completion, [True] * len(table)), names, 2, 100_000)
    assert abs(plan.live_per_rank[0] - plan.live_per_rank[1]) <= 50 + 8 * 30


def test_no_live_row_is_a_stand_in_a_rank() -> None:
    plan = plan_shared(Rows([3, 4], [2, 2], [False, False]), [1, 2], 2, 10)
    assert plan.bins == [[[]], [[]]]
    assert plan.shared


def test_names_that_are_not_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"prompts must be whole numbers, one per row; got float64"):
        plan_shared(Rows([3], [2], [True]), [0.5], 1, 10)
    with pytest.raises(ValueError, match=r"2 prompts for 1 rows"):
        plan_shared(Rows([3], [2], [True]), [1, 2], 1, 10)


def both(prompt: int, completions: tuple[int, ...], groups: int, budget: int) -> tuple[Plan, Plan]:
    table = [(prompt, c, group) for group in range(groups) for c in completions]
    prompts, lengths, names = zip(*table, strict=True)
    rows = Rows(prompts, lengths, [True] * len(table))
    return plan_update(rows, 1, budget), plan_shared(rows, names, 1, budget)


def test_the_cheaper_plan() -> None:
    plain, shared = both(200, (20,) * 8, 4, 4000)
    assert cheaper(plain, shared) is shared
    # one row a prompt: nothing is saved
    plain, shared = both(200, (20,), 4, 4000)
    assert plain.tokens_computed == shared.tokens_computed
    assert cheaper(plain, shared) is plain
    # but for an attention to which padded and packed rows are alike, wherever that spares a token of padding
    prompts, lengths = (200, 190, 180), (40, 30, 30)
    rows = Rows(prompts, lengths, [True] * 3)
    plain, shared = plan_update(rows, 1, 4000), plan_shared(rows, (1, 2, 3), 1, 4000)
    assert plain.tokens_computed > shared.tokens_computed == sum(prompts) + sum(lengths)
    assert [cheaper(plain, shared), cheaper(plain, shared, 0.0, 0)] == [plain, shared]
    # the longer the prompt, the more is saved; where it starts to pay it pays from there on
    chosen = [cheaper(*both(prompt, (40, 38, 36, 34), 6, 4000)).shared for prompt in (1, 2, 4, 8, 16, 32, 64)]
    assert chosen[-1]
    assert all(later or not earlier for earlier, later in pairwise(chosen))
