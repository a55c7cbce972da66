"""A judge that errs: no noise, people's (Bradley-Terry), a preference for length; and the stage that has it."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest

from grpo_lab.curation import Sampled
from grpo_lab.rewards.comparisons import Judge
from grpo_lab.stages.select import Judged

TRUTH, PEOPLE, SYSTEMATIC = Judge(), Judge(temperature=1.0), Judge(longer=0.4)
N = 4000


def share(judge: Judge, qualities: tuple[float, float], lengths: tuple[int, int]) -> float:
    """Of N prompts, those in which the first of two answers is preferred. Two of its errors are 2·√(¼/4000) = 0.016."""
    said = [judge.prefers(f"prompt {n}", ("blue", "amber"), qualities, lengths) for n in range(N)]
    return sum(map(bool, said)) / N


def test_without_noise_it_is_the_truth() -> None:
    assert share(TRUTH, (1.0, 0.0), (3, 9)) == 1.0
    assert share(TRUTH, (0.2, 0.7), (9, 3)) == 0.0
    assert TRUTH.prefers("?", ("blue", "amber"), (1.0, 1.0), (3, 9)) is None


@pytest.mark.parametrize(
    ("gap", "temperature", "expected"),
    [
        (1.0, 1.0, 0.7311),  # 1/(1 + e⁻¹) = 1/1.36788
        (1.0, 0.5, 0.8808),  # 1/(1 + e⁻²) = 1/1.13534
        (0.5, 1.0, 0.6225),  # 1/(1 + e^−½) = 1/1.60653
        (0.0, 1.0, 0.5),
        (-1.0, 0.5, 0.1192),
        (1e6, 1e-3, 1.0),  # no overflow
    ],
)
def test_people_err_more_often_where_there_is_less_between_them(
    gap: float, temperature: float, expected: float
) -> None:
    found = share(Judge(temperature=temperature), (0.3 + gap, 0.3), (3, 9))
    assert found == pytest.approx(expected, abs=2.5 * math.sqrt(expected * (1 - expected) / N))


def test_length_is_preferred_in_its_share_whatever_is_right() -> None:
    """The shorter one is right: it loses in 40%. The longer one is right: it never does. Of people with T = 1 besides:
    0.6 · 0.7311 = 0.4387 are left to the shorter one. Of equal length: none is decided by it."""
    error = 2.5 * math.sqrt(0.24 / N)
    assert share(SYSTEMATIC, (1.0, 0.0), (3, 9)) == pytest.approx(0.6, abs=error)
    assert share(SYSTEMATIC, (1.0, 0.0), (9, 3)) == 1.0
    assert share(Judge(temperature=1.0, longer=0.4), (1.0, 0.0), (3, 9)) == pytest.approx(0.4387, abs=error)
    assert share(SYSTEMATIC, (1.0, 0.0), (5, 5)) == 1.0
    assert share(Judge(longer=1.0), (0.0, 1.0), (9, 3)) == 1.0


@pytest.mark.parametrize("judge", [TRUTH, PEOPLE, SYSTEMATIC, Judge(temperature=0.7, longer=0.3, seed=5)])
def test_either_way_round_is_one_verdict_and_another_seed_another_noise(judge: Judge) -> None:
    verdicts = []
    for n in range(300):
        texts, qualities, lengths = ("blue", "amber"), (n % 3 / 2, n % 2 / 1.0), (n % 5, n % 4)
        one = judge.prefers(n, texts, qualities, lengths)
        other = judge.prefers(n, texts[::-1], qualities[::-1], lengths[::-1])
        assert other is (None if one is None else not one)
        assert judge.prefers(n, texts, qualities, lengths) is one
        verdicts.append(one)
    again = Judge(judge.temperature, judge.longer, judge.seed + 1)
    differ = sum(
        again.prefers(n, ("blue", "amber"), (n % 3 / 2, n % 2 / 1.0), (n % 5, n % 4)) is not said
        for n, said in enumerate(verdicts)
    )
    assert (differ > 10) == (judge is not TRUTH)


def test_pairs_of_a_prompt() -> None:
    """Six completions: two equal, one without quality, so five texts to compare: C(5, 2) − the pair of equals = 9."""
    texts, lengths = ["a", "bb", "bb", "dddd", "eeeee", "f"], [1, 2, 2, 4, 5, 1]
    qualities = [1.0, 0.0, 0.0, 1.0, 0.0, None]
    by_people = PEOPLE.pairs("?", texts, qualities, lengths)
    assert {frozenset(two) for two in by_people} == {*map(frozenset, combinations(range(5), 2))} - {frozenset({1, 2})}
    truth = TRUTH.pairs("?", texts, qualities, lengths)
    assert sorted(truth) == [(0, 1), (0, 2), (0, 4), (3, 1), (3, 2), (3, 4)]  # right before wrong, and no ties
    assert [frozenset(two) for two in by_people if frozenset(two) in {*map(frozenset, truth)}] == [
        *map(frozenset, truth)  # all judges go by one order
    ]
    assert TRUTH.pairs("?", texts, qualities, lengths, most=2) == truth[:2]
    assert {*Judge(seed=3).pairs("?", texts, qualities, lengths)} == {*truth}
    assert TRUTH.pairs("?", texts, [math.nan] * 6, lengths) == []


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": math.inf}, {"longer": 1.2}, {"longer": -0.1}])
def test_what_no_judge_is(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a number from 0 on, and a share in\s+\[0, 1\]"):
        Judge(**wrong)


def test_the_stage_builds_rows_and_counts_what_was_said_wrong() -> None:
    """Messages as the chat template has them. longer = 1: of (right, 2 tokens), (wrong, 5), (wrong, 3) the longest
    wins twice and the middle one once: two pairs prefer a wrong one to the right one, one is between equals."""
    prompt = [{"role": "user", "content": "1 + 1?"}]
    texts = [[{"role": "assistant", "content": one}] for one in ("2", "it is 3 I think", "is it 4")]
    samples = [Sampled(prompt, texts, [1.0, 0.0, 0.0], [2, 5, 3])]
    rows, counts = Judged(longer=1.0).rows(samples)
    assert counts == {"wrong": 2, "ties": 1, "longer": 3}
    assert {(row["chosen_length"], row["rejected_length"]) for row in rows} == {(5, 2), (3, 2), (5, 3)}
    assert all(row["prompt"] == prompt and row["chosen"] in texts for row in rows)
    rows, counts = Judged(per_problem=1).rows(samples)
    assert (len(rows), counts["wrong"], counts["ties"]) == (1, 0, 0)
    assert (rows[0]["chosen"], rows[0]["chosen_quality"], rows[0]["rejected_quality"]) == (texts[0], 1.0, 0.0)
