"""The loader ``sorting``: what a row holds, splits that share no sorted answer, a cold start that says nothing of the
prompt."""

from __future__ import annotations

from collections import Counter

import pytest

from grpo_lab.data import SORTING_SPLITS, sorting
from grpo_lab.rewards import SortingReward


def test_a_row_and_its_reward() -> None:
    rows = sorting(50, seed=3, template="none")
    for row in rows:
        assert row["prompt"] == row["question"] == " ".join(map(str, row["numbers"]))
        assert row["solution"] == " ".join(map(str, sorted(row["numbers"])))
        assert len(row["worked_solution"].split()) == 4
    assert SortingReward("exact")(completions=rows["solution"], numbers=rows["numbers"]) == [1.0] * 50
    assert rows["question"] == sorting(50, seed=3)["question"] != sorting(50, seed=4)["question"]
    assert sorting(1)[0]["prompt"] == [{"role": "user", "content": sorting(1)[0]["question"]}]


@pytest.mark.not_fast
def test_splits_share_no_sorted_answer_and_are_all_of_them() -> None:
    """V^L = 625 prompts of 4 numbers out of 5; 70 different sorted answers (4 out of 5 with repetition: C(8, 4))."""
    answers: dict[str, set[str]] = {}
    prompts = 0
    for split in SORTING_SPLITS:
        found = 1
        while True:  # ends where the loader says that there are no more
            try:
                rows = sorting(found, split=split, vocabulary=5)
            except ValueError as error:
                found = int(str(error).split()[1])
                rows = sorting(found, split=split, vocabulary=5)
                break
            found *= 2
        answers[split], prompts = set(rows["solution"]), prompts + len(set(rows["question"]))
    assert prompts == 625
    assert sum(map(len, answers.values())) == len(set().union(*answers.values())) == 70


def test_the_cold_start_teaches_the_form_and_nothing_else() -> None:
    """Random answers earn what a uniform policy earns, 3.03 of 7: ± 4 standard errors, σ < 1.5 and n = 1000."""
    rows = sorting(1000, split="cold_start")
    scores = SortingReward("inclusion_ordering")(completions=rows["worked_solution"], numbers=rows["numbers"])
    assert sum(s or 0.0 for s in scores) / 1000 == pytest.approx(3.03, abs=4 * 1.5 / 1000**0.5)
    assert set(Counter(" ".join(rows["worked_solution"]).split())) == set("0123456789")


@pytest.mark.not_fast(cases="arguments4-different prompts were found for split='train', length=4, vocabulary=10")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"split": "held_out"}, r"`split` is 'held_out'\. Allowed: \['test', 'cold_start', 'train'\]"),
        ({"n": 0}, "n is 0; at least 1"),
        ({"vocabulary": 1}, "vocabulary is 1; at least 2"),
        ({"length": 0}, "length is 0; at least 1"),
        ({"n": 10_001}, "different prompts were found for split='train', length=4, vocabulary=10"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sorting(**{"n": 5, **arguments})  # type: ignore[arg-type]
