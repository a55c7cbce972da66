"""``SortingReward``: hand values of all kinds, a random policy's expectation by enumeration, what cannot be scored."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from grpo_lab.rewards import SortingReward


def score(kind: str, text: str, numbers: list[int]) -> float | None:
    return SortingReward(kind)(completions=[text], numbers=[numbers])[0]


@pytest.mark.parametrize(
    ("text", "numbers", "distance", "code", "formula", "exact"),
    [
        # sorted 2 4 4 4: only the third place; 4 prompt tokens occur, 3 pairs; min counts 1 + 1
        ("0 2 4 6", [4, 2, 4, 4], 1, 7, 5, 0),
        ("2 4 4 4", [4, 2, 4, 4], 4, 7, 7, 1),
        ("[1, 2, 3, 4]", [4, 3, 2, 1], 4, 7, 7, 1),
        ("4 3 2 1", [4, 3, 2, 1], 0, 4, 4, 0),  # all included, no pair in order
        ("5 5 5 5", [1, 2, 3, 4], 0, 3, 3, 0),  # nothing included, equal neighbours are in order
        # 0 0 1 9 against 9 1 1 0: the third place; included 4 (0 twice) or 1, 0, 9; one pair (1, 1)
        ("9 1 1 0", [1, 0, 0, 9], 1, 5, 4, 0),
        ("1 2 3", [4, 3, 2, 1], 0, 0, 0, 0),  # fewer
        ("1 2 3 4 5", [4, 3, 2, 1], 0, 0, 0, 0),  # more
        ("", [4, 3, 2, 1], 0, 0, 0, 0),
        ("-3 -1 0 2", [2, -1, 0, -3], 4, 7, 7, 1),
    ],
)  # fmt: skip
def test_by_hand(text: str, numbers: list[int], distance: float, code: float, formula: float, exact: float) -> None:
    kinds = ("distance", "inclusion_ordering", "inclusion_ordering_multiset", "exact")
    assert [score(kind, text, numbers) for kind in kinds] == [distance, code, formula, exact]


@pytest.mark.not_fast
def test_a_random_policy_by_enumeration() -> None:
    """All prompts of four digits against all answers, by symmetry in two sums: pairs in order 3 · 0.55 = 1.65;
    inclusion by the code 4 · (1 − 0.9⁴) = 1.3756, sum 3.03. The formula's is enumerated over counts of one number: 10 ·
    E min(A, B), A and B ~ Bin(4, 0.1)."""
    prompts = [list(p) for p in itertools.product(range(10), repeat=4)][::97]
    answers = [list(a) for a in itertools.product(range(10), repeat=4)][::89]
    rows = [(" ".join(map(str, a)), p) for p in prompts for a in answers]
    texts, numbers = [text for text, _ in rows], [row for _, row in rows]
    chance = [
        Fraction(comb) * Fraction(1, 10) ** k * Fraction(9, 10) ** (4 - k) for k, comb in enumerate((1, 4, 6, 4, 1))
    ]
    overlap = 10 * sum(min(a, b) * chance[a] * chance[b] for a in range(5) for b in range(5))
    for kind, expected in (
        ("inclusion_ordering", 1.65 + 4 * (1 - 0.9**4)),
        ("inclusion_ordering_multiset", 1.65 + float(overlap)),
    ):
        scores = [value for value in SortingReward(kind)(completions=texts, numbers=numbers) if value is not None]
        assert sum(scores) / len(scores) == pytest.approx(expected, abs=0.06)  # every 97th and 89th, not all 10⁸
    assert (round(1.65 + 4 * (1 - 0.9**4), 2), round(1.65 + float(overlap), 2)) == (3.03, 2.86)


def test_conversations_and_hostile_numbers() -> None:
    said = [[{"role": "assistant", "content": "1 2 3 4"}], "9" * 100_000 + " 1 2 3", "1 2 3 ４"]
    assert SortingReward("exact")(completions=said, numbers=[[1, 2, 3, 4]] * 3) == [1.0, 0.0, 0.0]
    assert SortingReward("distance")(completions=["1"], numbers=[[]]) == [None]


def test_a_number_of_any_length_has_its_place_in_the_order() -> None:
    """[1, 2] → 1, 9…9: 1 is included, and the pair is in order."""
    for digits in (30, 5000):
        for kind in ("inclusion_ordering", "inclusion_ordering_multiset"):
            assert score(kind, "1 " + "9" * digits, [1, 2]) == 2
            assert score(kind, "9" * digits + " 1", [1, 2]) == 1
            assert score(kind, "-" + "9" * digits + " 1", [1, 2]) == 2
    assert score("exact", "1 " + "9" * 30, [int("9" * 30), 1]) == 1


def test_rows_as_a_data_set_gives_them() -> None:
    rows = [np.array([2, 1]), torch.tensor([2, 1]), (2, 1), None, np.array([], dtype=int)]
    assert SortingReward("exact")(completions=["1 2"] * 5, numbers=rows) == [1.0, 1.0, 1.0, None, None]  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"`numbers` holds the text '2 1'; it must be a list of integers"):
        SortingReward("exact")(completions=["1 2"], numbers=["2 1"])  # type: ignore[list-item]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'sorted'; it must be one of"):
        SortingReward("sorted")
    with pytest.raises(ValueError, match="column 'numbers'"):
        SortingReward("exact")(completions=["1"])
    with pytest.raises(ValueError, match="one to one"):
        SortingReward("exact")(completions=["1"], numbers=[])
