"""Countdown: hand values, the generator against its own reward, hostile texts."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from grpo_lab.data import countdown
from grpo_lab.rewards import CountdownReward
from grpo_lab.rewards.arithmetic import NotArithmetic
from grpo_lab.rewards.puzzles import reaches, value_and_numbers


def score(text: str, numbers: Any, target: Any) -> float | None:
    return CountdownReward()(completions=[text], numbers=[numbers], target=[target])[0]


@pytest.mark.parametrize(
    ("text", "numbers", "target", "expected"),
    [
        ("<answer>(3 + 5) * 4</answer>", [3, 4, 5], 32, 1.0),
        ("<answer>(3 + 5) * 4 = 32</answer>", [3, 4, 5], 32, 1.0),
        ("<answer>3 - 5 = -2</answer>", [3, 5], -2, 1.0),
        ("<answer>3 - 5 = −2</answer>", [3, 5], -2, 1.0),
        ("<answer>3 - 5 = 2</answer>", [3, 5], -2, 0.0),
        ("<answer>5 - 3 = --2</answer>", [3, 5], 2, 0.0),
        ("<answer>(3 + 5) × 4 = 33</answer>", [3, 4, 5], 32, 0.0),  # says another number than it is
        ("<answer>(3 + 5) * 4</answer>", [3, 4, 5], 33, 0.0),
        ("<answer>(3 + 5) * 4</answer>", [3, 4, 5, 5], 32, 0.0),  # one left over
        ("<answer>(3 + 5) * (3 + 1)</answer>", [3, 5, 1], 32, 0.0),  # 3 twice
        ("<answer>32</answer>", [3, 4, 5], 32, 0.0),
        ("<answer>35 - 3</answer>", [3, 5, 3], 32, 0.0),  # digits put together
        ("<answer>8 / 3 * 3</answer>", [8, 3, 3], 8, 1.0),  # by way of 8/3, exactly
        ("<answer>1 / (1 - 5 / 7) * 2</answer>", [1, 1, 5, 7, 2], 7, 1.0),  # 1 / (2/7) · 2
        ("<answer>5 - 3 - 2 + 0</answer>", [0, 2, 3, 5], 0, 1.0),  # from the left
        ("<answer>-3 + 5</answer>", [3, 5], 2, 0.0),  # the game has no sign
        ("<answer>3 + 5</answer> no: <answer>5 * 3</answer>", [3, 5], 15, 1.0),  # the last one counts
        ("<think><answer>3 + 5</answer></think>5 * 3", [3, 5], 15, 1.0),
        ("first 3 + 5 = 8\n5 × 3 = 15", [3, 5], 15, 1.0),  # the last line
        ("```\n5 ÷ 1 − 2\n```", [5, 1, 2], 3, 1.0),
        ("<answer>$5 * 3$.</answer>", [3, 5], 15, 1.0),
        ("<answer>5 / (3 - 3)</answer>", [3, 3, 5], 5, 0.0),
        ("<answer></answer>", [3], 3, 0.0),
        ("", [3], 3, 0.0),
        ("3", [3], 3, 1.0),
        ("3", [], 3, None),
        ("3", [3], None, None),
        ("3", [3], 3.5, None),
        ("3", [3.2], 3, None),
        ("3", [3], float("inf"), None),
        ("3", [3], "3", 1.0),
        ("3", [3.0], 3.0, 1.0),
        ("1 + 2", "12", 3, None),  # a text is no list of numbers
        ("1 + 2", b"12", 3, None),
        ("1 + 2", "[1, 2]", 3, None),
        ("1 + 2", "1,2", 3, None),
    ],
)
def test_by_hand(text: str, numbers: Any, target: Any, expected: float | None) -> None:
    assert score(text, numbers, target) == expected


HOSTILE = [
    "__import__('os').system('true')", "3 if 1 else 5", "(3).__class__", "3**5", "3//5", "3 ** 9 ** 9 ** 9",
    "3 + 5; 15", "lambda: 15", "3 5", "15#", "1e1+5", "0x3+5", "3_0-15", "٣ * 5", "３ * 5", "3 * 5 == 15",
    "3 * 5 = 15 = 15", "3 * 5\0", "(3 * 5", "3 * 5)", "()", "+", "3 *", "* 3 5", "[3, 5]", "True", "3 * 5 or 15",
    "3 \u202e* 5", "3!", "C(3,5)", "3 * 5 % 99", "((((((3)))))) * 5 * 1", "(" * 10_000 + "3" + ")" * 10_000,
    "9" * 100_000, "1+" * 50_000 + "1", "<answer>" * 10_000, "=" * 100_000, "3*" * 200 + "5",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode())
def test_hostile_expressions_earn_nothing_at_once(text: str) -> None:
    start = time.process_time()
    assert score(f"<answer>{text}</answer>", [3, 5], 15) == 0.0
    assert time.process_time() - start < 1.0


def test_brackets_within_the_limit_are_read() -> None:
    assert value_and_numbers("(" * 50 + "3" + ")" * 50) == (Fraction(3), [3])
    with pytest.raises(NotArithmetic):
        value_and_numbers("(" * 51 + "3" + ")" * 51)


def test_every_made_game_has_the_solution_that_it_was_made_from() -> None:
    rows = countdown(200, seed=3, numbers=(2, 5), template="none")
    answers = rows["worked_solution"]
    assert CountdownReward()(completions=answers, numbers=rows["numbers"], target=rows["target"]) == [1.0] * 200
    assert all(not reaches(str(row["target"]), row["numbers"], row["target"]) for row in rows)
    assert {len(row["numbers"]) for row in rows} == {2, 3, 4, 5}
    assert rows["prompt"] == rows["question"]
    assert all(max(row["numbers"]) <= 25 and 2 <= row["target"] <= 100 for row in rows)


def test_splits_share_no_game_and_seeds_repeat() -> None:
    games = {
        split: {(tuple(sorted(row["numbers"])), row["target"]) for row in countdown(300, seed=1, split=split)}
        for split in ("train", "cold_start", "test")
    }
    assert not games["train"] & games["test"]
    assert not games["train"] & games["cold_start"]
    assert not games["test"] & games["cold_start"]
    assert countdown(5, seed=1)["question"] == countdown(5, seed=1)["question"] != countdown(5, seed=2)["question"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"n": 0}, "n is 0"), ({"n": 1, "split": "dev"}, "dev"), ({"n": 1, "numbers": (5, 3)}, "numbers"),
     ({"n": 999, "numbers": (2, 2), "largest": 3}, "only")],
)  # fmt: skip
def test_settings_that_cannot_be(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        countdown(**settings)  # type: ignore[arg-type]
