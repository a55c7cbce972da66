"""Credit for turns against loops in float64; hand values; what a turn without peers, without a score or without an
outcome gets; padding, ranks and the order of rows do not matter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import turn_oracle as oracle
from grpo_lab.advantages import GAE, Process, StepTable, TurnGAE, advantage_rule, gae, on_own_tokens
from grpo_lab.advantages.returns import DELTAS
from grpo_lab.batch import LocalRows, RewardTable

RULES = [
    *({"name": "turn_returns", "gamma": gamma, "delta": delta} for gamma in (0.0, 0.5, 1.0) for delta in DELTAS),
    *({"name": "turn_spread", "gamma": gamma, "weight": 0.3} for gamma in (0.0, 0.8)),
]
RULES = [rule for rule in RULES if rule.get("delta") != "group_max"]  # shown by its own rule's tests


def table(
    scores: list[list[float | None]],
    outcomes: list[float | None] | None = None,
    size: int = 2,
    rows: slice | None = None,
    long: int = 3,
    width: int | None = None,
) -> RewardTable:
    """Turns of ``long`` own tokens, with a token of a tool between them."""
    ends = [[(long + 1) * k + long - 1 for k in range(len(row))] for row in scores]
    steps = StepTable.of([list(zip(*one, strict=True)) for one in zip(ends, scores, strict=True)], size)
    mine = rows or slice(0, len(scores))
    width = width or max([end[-1] + 1 for end in ends[mine] if end], default=1)
    place = torch.arange(width)
    lengths = torch.tensor([end[-1] + 1 if end else 0 for end in ends[mine]])
    mask = (place < lengths[:, None]) & (place % (long + 1) != long)
    local = LocalRows(mine, mask, lengths)
    means = [[sum(s for s in row if s is not None)] for row in scores]
    values = torch.tensor(means, dtype=torch.float64)
    names = ("turn_rewards",)
    if outcomes is not None:
        paid = torch.tensor([[float("nan") if o is None else o] for o in outcomes], dtype=torch.float64)
        values = torch.cat([values, paid], dim=1)
        names = (*names, "right")
    return RewardTable(values, names, torch.ones(len(names)), size, steps={0: steps}, local=local)


def random_scores(seed: int, rows: int = 8) -> tuple[list[list[float | None]], list[float | None]]:
    rng = random.Random(seed)
    choices = [0.0, 0.1, 0.2, 0.3, 1.0, -0.5, None]
    scores = [[rng.choice(choices) for _ in range(rng.choice([0, 1, 1, 2, 3, 6]))] for _ in range(rows)]
    return scores, [rng.choice([0.0, 1.0, 0.25, None]) for _ in range(rows)]


def by_turn(found: torch.Tensor, scores: list[list[float | None]], long: int = 3) -> list[list[float]]:
    """The advantage of each turn, after a look that all its tokens have it."""
    made = []
    for row, own in zip(found.tolist(), scores, strict=True):
        of_row = [row[(long + 1) * k : (long + 1) * k + long] for k in range(len(own))]
        assert all(len(set(tokens)) == 1 for tokens in of_row)
        made.append([tokens[0] for tokens in of_row])
    return made


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("with_outcome", [True, False])
def test_literal_loops(rule: dict[str, Any], with_outcome: bool) -> None:
    for seed in range(60):
        scores, outcomes = random_scores(seed)
        if not with_outcome:
            outcomes = [None] * len(scores)
        found = advantage_rule(**rule)(table(scores, outcomes if with_outcome else None, size=4))
        expected = oracle.credited(rule, scores, outcomes, size=4)
        for ours, theirs in zip(by_turn(found, scores), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_hand_values() -> None:
    # two completions: scores 1, 0 with outcome 1; and 0, 1, 1 with outcome 0. γ = ½ pays the outcome in the last turn:
    # R_1 = 1 + 0 + ½·1 = 1.5, R_2 = 0 + 1 = 1;   R_1 = 0 + ½ + ¼ = 0.75, R_2 = 1 + ½ = 1.5, R_3 = 1, without peers
    scores: list[list[float | None]] = [[1.0, 0.0], [0.0, 1.0, 1.0]]
    batch = table(scores, [1.0, 0.0])
    raw = advantage_rule("turn_returns", gamma=0.5, delta="raw")(batch)
    assert by_turn(raw, scores) == [[1.5, 1.0], [0.75, 1.5, 1.0]]
    mean = advantage_rule("turn_returns", gamma=0.5)(batch)
    assert by_turn(mean, scores) == [[0.375, -0.25], [-0.375, 0.25, 0.0]]
    others = advantage_rule("turn_returns", gamma=0.5, delta="leave_one_out")(batch)
    assert by_turn(others, scores) == [[0.75, -0.5], [-0.75, 0.5, 0.0]]
    # outcomes 1 and 0 are ±½ on all turns; own scores 1, 0 and 0, 1 are ±½ and ∓½, twice as heavy
    spread = advantage_rule("turn_spread", weight=2.0, delta="group_mean")(batch)
    assert by_turn(spread, scores) == [[1.5, -0.5], [-1.5, 0.5, -0.5]]


def test_equal_on_paper_is_exactly_zero() -> None:
    """0.1 + 0.2 is 0.3 to float32, and such turns are left out."""
    scores: list[list[float | None]] = [[0.1, 0.2], [0.3, 0.0], [0.0, 0.3]]
    found = advantage_rule("turn_returns", delta="group_zscore")(table(scores, size=3))
    assert [row[0] for row in by_turn(found, scores)] == [0.0, 0.0, 0.0]
    assert (found[:, 4:7] != 0).all()


def test_an_unscored_turn_keeps_what_came_after_it() -> None:
    scores: list[list[float | None]] = [[None, 1.0, None], [0.5, 0.0, 2.0]]
    found = by_turn(advantage_rule("turn_returns", delta="raw")(table(scores)), scores)
    assert found == [[1.0, 1.0, 0.0], [2.5, 2.0, 2.0]]  # nothing is known of the first one's third turn
    mean = by_turn(advantage_rule("turn_returns")(table(scores)), scores)
    assert mean == [[-0.75, -0.5, 0.0], [0.75, 0.5, 0.0]]


@pytest.mark.parametrize("rule", [*RULES[::3], RULES[-1]], ids=str)
def test_ranks_padding_and_the_order_of_rows(rule: dict[str, Any]) -> None:
    scores, outcomes = random_scores(7)
    whole = advantage_rule(**rule)(table(scores, outcomes, size=4))
    wide = advantage_rule(**rule)(table(scores, outcomes, size=4, width=whole.size(1) + 5))
    assert torch.equal(wide[:, : whole.size(1)], whole)
    assert not wide[:, whole.size(1) :].any()
    for rows in (slice(0, 2), slice(2, 8)):
        mine = advantage_rule(**rule)(table(scores, outcomes, size=4, rows=rows))
        assert torch.equal(mine, whole[rows, : mine.size(1)])
        assert not whole[rows, mine.size(1) :].any()
    order = [2, 0, 3, 1, 7, 6, 5, 4]
    moved = advantage_rule(**rule)(table([scores[i] for i in order], [outcomes[i] for i in order], size=4))
    torch.testing.assert_close(moved, whole[order], rtol=1e-12, atol=1e-12)
    swapped = [*range(4, 8), *range(4)]
    groups = advantage_rule(**rule)(table([scores[i] for i in swapped], [outcomes[i] for i in swapped], size=4))
    torch.testing.assert_close(groups, whole[swapped], rtol=1e-12, atol=1e-12)


def test_several_rewards_of_turns_are_added_up_and_others_refused() -> None:
    scores: list[list[float | None]] = [[1.0, None], [0.0, 1.0]]
    batch = table(scores)
    other = table([[0.5, None], [None, 2.0]]).steps[0]
    values = torch.cat([batch.values, batch.values], dim=1)
    both = replace(
        batch, values=values, names=("a", "b"), weights=torch.tensor([1.0, 2.0]), steps={0: batch.steps[0], 1: other}
    )
    raw = advantage_rule("turn_returns", gamma=0.0, delta="raw")(both)
    assert by_turn(raw, scores) == [[2.0, 0.0], [0.0, 5.0]]
    elsewhere = table([[0.5], [1.0, 2.0]]).steps[0]
    with pytest.raises(ValueError, match=r"'a' and 'b' end their steps at different tokens.*process"):
        advantage_rule("turn_returns")(replace(both, steps={0: batch.steps[0], 1: elsewhere}))


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("turn_returns", {"gamma": 1.5}, r"`advantage.gamma` is 1.5"),
        ("turn_returns", {"delta": "maxrl"}, r"`advantage.delta` is 'maxrl'"),
        ("turn_spread", {"weight": -1.0}, r"`advantage.weight` is -1.0"),
        ("turn_gae", {"turn_gamma": 2.0}, r"`advantage.turn_gamma` is 2.0"),
    ],
)
def test_knobs(name: str, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        advantage_rule(name, **knobs)


def test_a_table_without_turns_or_rows() -> None:
    batch = table([[1.0], [0.0]], [1.0, 0.0])
    for name in ("turn_returns", "turn_spread", "turn_gae"):
        with pytest.raises(ValueError, match=r"local|values"):
            advantage_rule(name)(replace(batch, local=None))
    with pytest.raises(ValueError, match=r"scores of turns"):
        advantage_rule("turn_returns")(replace(batch, steps={}))


def bi_level(
    rewards: list[float], values: list[float], turns: list[list[int]], gamma: float, lam: float, turn_gamma: float
) -> dict[int, float]:
    """One row, token by token: over turns, then within each (``turns``: the own tokens of each)."""
    found, ahead, following = {}, 0.0, 0.0
    goals = {}
    for own in reversed(turns):
        end = own[-1]
        ahead = rewards[end] + turn_gamma * following - values[end] + turn_gamma * lam * ahead
        following = values[end]
        goals[end] = ahead + values[end]
    for own in turns:
        later, after = 0.0, 0.0
        for t in reversed(own):
            earned = goals[t] if t == own[-1] else rewards[t]
            later = earned + gamma * after - values[t] + gamma * lam * later
            after = values[t]
            found[t] = later
    return found


@pytest.mark.parametrize("seed", range(20))
def test_gae_over_turns(seed: int) -> None:
    scores, outcomes = random_scores(seed)
    batch = table(scores, outcomes, size=4)
    assert batch.local is not None
    random_ = torch.Generator().manual_seed(seed)
    mask = batch.local.mask & (torch.rand(batch.local.mask.shape, generator=random_) < 0.8)  # inserted text
    rewards, values = torch.randn(2, *mask.shape, generator=random_, dtype=torch.float64)
    local = replace(batch.local, mask=mask, rewards=rewards, values=values)
    found = TurnGAE(gamma=0.9, lam=0.8, turn_gamma=0.7)(replace(batch, local=local))
    for row, own in enumerate(mask.tolist()):
        of_turns = [[t for t in range(4 * k, 4 * k + 3) if own[t]] for k in range(len(scores[row]))]
        expected = bi_level(
            rewards[row].tolist(), values[row].tolist(), [tokens for tokens in of_turns if tokens], 0.9, 0.8, 0.7
        )
        assert found[row].tolist() == pytest.approx([expected.get(t, 0.0) for t in range(mask.size(1))], abs=1e-12)


def test_gae_of_one_turn_is_gae() -> None:
    batch = table([[1.0], [None]])
    assert batch.local is not None
    rewards, values = torch.randn(2, *batch.local.mask.shape, dtype=torch.float64)
    held = replace(batch, local=replace(batch.local, rewards=rewards, values=values))
    expected = gae(rewards, values, batch.local.mask, 0.9, 0.8)[0]
    torch.testing.assert_close(TurnGAE(0.9, 0.8, 0.5)(held), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(GAE(0.9, 0.8)(held), expected)


def test_scores_lie_on_own_tokens() -> None:
    steps = StepTable.of([[(1, 1.0), (4, None), (5, 0.5)], [(2, 2.0)]], 1)
    mask = torch.tensor([[True, False, False, True, True, False], [True, True, True, False, False, False]])
    paid = on_own_tokens(steps, mask)
    assert paid.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]]


def test_turns_differ_from_process_supervision() -> None:
    """Process pools all scores of a group; here a turn is compared with its like."""
    scores: list[list[float | None]] = [[1.0, 0.0], [1.0, 0.0]]
    batch = table(scores)
    assert not advantage_rule("turn_returns", gamma=0.0)(batch).any()
    assert Process()(batch).any()
