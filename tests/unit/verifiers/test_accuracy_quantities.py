"""AccuracyReward reads what a number means: scale words, fractions, percents, units, shares, and several answers beside
one.

Every row of `number_cases.jsonl` is judged in both modes; 1 is right, 0 is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_lab.rewards import AccuracyReward
from grpo_lab.verifiers.quantity import in_digits, read_quantity

KINDS = ("percent", "words", "share", "several", "sentence_after", "units", "more", "asked", "brand", "equation")
with (Path(__file__).parent / "number_cases.jsonl").open(encoding="utf-8") as _lines:
    CASES = [json.loads(line) for line in _lines]
GOLDS = [  # (gold, an answer, 1, 0 or None: unscorable)
    ("12 million", "12", 0),
    ("12 million", "12000000", 1),
    ("two thirds", "\\frac{2}{3}", 1),
    ("forty-two", "42", 1),
    ("33\\frac{1}{3}\\%", "33\\frac{1}{3}\\%", 1),
    ("35\\%", "0.35", 1),
    ("35\\%", "3.5", 0),
    ("5k", "5000", 0),  # a gold with a variable
    ("5N", "5", 0),
    ("\\text{twelve}", "twelve", 1),
    ("\\text{8 out of 10}", "8 out of 10", 1),
    ("\\frac{1}{2}", "x=3 \\text{ and } y=\\frac{1}{2}", 0),
    ("2\\pi", "x=3 \\text{ and } y=2\\pi", 0),
    ("0.5", "\\frac{1}{2} \\text{ or } 0.5", 1),  # one value, said twice
    ("(3,5)", "(3,5)", 1),
    ("3, 5", "3 \\text{ and } 5", 1),
    ("3 quarters", "3", 1),  # coins
    ("two ways of doing it", "2", None),
]
STRICT_ONLY = [  # lenient falls back to the last number
    ("The answer is Tom has 3 and Ann has 5", "5", 0),
    ("The answer is: Anna has 3, and Tomas has 5", "5", 0),
    ("Answer: Anna: 3, Tomas: 5", "5", 0),
    ("The answer is two out of 5", "5", 0),
]


@pytest.fixture
def rewards(strict: AccuracyReward, lenient: AccuracyReward) -> dict[str, AccuracyReward]:
    return {"strict": strict, "lenient": lenient}


@pytest.mark.not_fast(cases="percent-*")
@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_against_a_gold(rewards: dict[str, AccuracyReward], kind: str, mode: str) -> None:
    cases = [case for case in CASES if case["kind"] == kind]
    questions = [case.get("question", "How many are left?") for case in cases]
    judged = rewards[mode].judge([case["completion"] for case in cases], [case["gold"] for case in cases], questions)
    pairs = zip(cases, judged, strict=True)
    assert len(cases) > 10
    assert [(case, one.answer, one.reason) for case, one in pairs if one.reward != case["reward"]] == []


def test_golds_in_words_percents_and_variables(rewards: dict[str, AccuracyReward]) -> None:
    judged = rewards["strict"].judge([f"\\boxed{{{answer}}}" for _, answer, _ in GOLDS], [gold for gold, _, _ in GOLDS])
    assert [(case, one.reason) for case, one in zip(GOLDS, judged, strict=True) if one.reward != case[2]] == []


def test_two_statements_are_no_single_answer(rewards: dict[str, AccuracyReward]) -> None:
    judged = rewards["strict"].judge([case[0] for case in STRICT_ONLY], [case[1] for case in STRICT_ONLY])
    assert [(case, one.answer) for case, one in zip(STRICT_ONLY, judged, strict=True) if one.reward != case[2]] == []


def test_what_a_prompt_counts_in_is_read_from_messages_too(rewards: dict[str, AccuracyReward]) -> None:
    asked = "Anna bakes.\nHow many dozen muffins are there?"
    prompts = [[{"role": "system", "content": "Answer."}, {"role": "user", "content": asked}], asked, None]
    assert rewards["strict"](prompts=prompts, completions=["\\boxed{7 dozen}"] * 3, solution=["7"] * 3) == [1, 1, 0]


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("So it costs 12 million.", "12", 0),
        ("So it costs 12 million.", "12000000", 1),
        ("She needs 3 dozen", "36", 1),
        ("He got 8 out of 10.", "10", 0),
        ("It is 17 or 18.", "18", 0),
        ("It is between 5 and 7", "7", 0),
        ("So 18, not 17.", "18", 0),
        ("So 16 - 7 = 9 and 9 * 2 = 18 dollars", "18", 1),
    ],
)
def test_lenient_reads_the_last_number_with_all_that_belongs_to_it(
    rewards: dict[str, AccuracyReward], completion: str, gold: str, reward: int
) -> None:
    assert rewards["lenient"](completions=[completion], solution=[gold]) == [reward]


def test_a_numbered_heading_is_no_answer(rewards: dict[str, AccuracyReward]) -> None:
    steps = "#### 1. Add the eggs\n3 + 4 = 7\n#### 2. Multiply by 2\nso 14"
    assert rewards["strict"](completions=[steps, f"{steps}\n#### 14. Jeff has 14"], solution=["2", "14"]) == [0, 1]


@pytest.mark.parametrize(
    ("text", "value", "rest"),
    [
        ("two hundred and five eggs", "205", " eggs"),
        ("one million two hundred thousand and five", "1200005", ""),
        ("2 million 500 thousand", "2500000", ""),
        ("half of a million", "500000", ""),
        ("two and a half million", "2500000", ""),
        ("three point five", "3.5", ""),
        ("12 hundredths", "0.12", ""),
        ("twenty-third", "20", "-third"),
        ("3 quarters", "3", " quarters"),
        ("3 quarters of the cake", "0.75", " of the cake"),
        ("2 gross", "288", ""),
        ("$5m", "5000000", ""),
        ("5 m", "5", " m"),
        ("1/0", "1", "/0"),
        ("a", None, ""),
        ("second", None, ""),
        ("million", None, ""),
        ("9" * 5000, None, ""),
    ],
)
def test_read_quantity(text: str, value: str | None, rest: str) -> None:
    found = read_quantity(text)
    assert (None if found is None else in_digits(found.value)) == value
    assert found is None or text[found.end :] == rest
