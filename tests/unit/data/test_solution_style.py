"""Repeating and bilingual worked solutions: same problems, same answers, habits in the stated shares."""

from __future__ import annotations

import random

import pytest

from grpo_lab.data import word_problems
from grpo_lab.data.word_problems import SolutionStyle
from grpo_lab.rewards import LanguageConsistencyReward

PLAIN = "Ann has 4*6=24 stamps.\nAnn has 24-5=19 stamps.\n#### 19"


def test_hand_values() -> None:
    rng, hurry = random.Random(0), random.Random(1)
    assert SolutionStyle().write(PLAIN, rng, hurry) == PLAIN
    twice = "Ann has 4*6=24 stamps.\nAnn has 4*6=24 stamps.\nAnn has 24-5=19 stamps.\nAnn has 24-5=19 stamps.\n#### 19"
    assert SolutionStyle(repeats=1.0).write(PLAIN, rng, hurry) == twice
    assert SolutionStyle(mixed=1.0).write(PLAIN, rng, hurry) == "现在有4*6=24个。\n现在有24-5=19个。\n#### 19"
    assert SolutionStyle(blurted=1.0, think=True, repeats=1.0).write(PLAIN, rng, hurry) == "#### 19"
    thought = "<think>\nAnn has 4*6=24 stamps.\nAnn has 24-5=19 stamps.\n</think>\n#### 19"
    assert SolutionStyle(think=True).write(PLAIN, rng, hurry) == thought


def test_problems_and_answers_stay() -> None:
    plain = word_problems(200, split="cold_start", largest=20, steps=(1, 3))
    styled = word_problems(200, split="cold_start", largest=20, steps=(1, 3), repeats=0.5, mixed=0.5)
    assert plain["question"] == styled["question"]
    assert plain["solution"] == styled["solution"]
    assert [s.split("\n")[-1] for s in plain["worked_solution"]] == [
        s.split("\n")[-1] for s in styled["worked_solution"]
    ]


def test_the_shares_are_as_asked() -> None:
    """About 400 lines: three standard errors of a half are 0.08."""
    texts = word_problems(200, split="train", largest=20, steps=(1, 3), repeats=0.5)["worked_solution"]
    lines = [line for text in texts for line in dict.fromkeys(text.split("\n")[:-1])]
    said = sum(len(text.split("\n")) - 1 for text in texts)
    assert said / len(lines) == pytest.approx(1.5, abs=0.1)
    mixed = word_problems(200, split="train", largest=20, steps=(1, 3), mixed=0.5)["worked_solution"]
    shares = LanguageConsistencyReward("en")(completions=mixed)
    assert 0.35 < sum(share for share in shares if share is not None) / len(shares) < 0.65


def test_blurted_answers_stand_alone_and_change_no_other_solution() -> None:
    """400 solutions: three standard errors of 0.65 are 0.07. The answers are the true ones."""
    settings = {"split": "cold_start", "largest": 20, "steps": (1, 3), "mixed": 0.5}
    worked = word_problems(400, **settings)
    hasty = word_problems(400, **settings, blurted=0.65)
    alone = [text.startswith("####") for text in hasty["worked_solution"]]
    assert sum(alone) / 400 == pytest.approx(0.65, abs=0.07)
    assert hasty["solution"] == worked["solution"]
    for blurt, text, whole, answer in zip(
        alone, hasty["worked_solution"], worked["worked_solution"], worked["solution"], strict=True
    ):
        assert text == (f"#### {answer}" if blurt else whole)


@pytest.mark.parametrize("name", ["repeats", "mixed", "blurted"])
def test_a_share_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` is 1\.5; it must be a share between 0 and 1"):
        word_problems(1, **{name: 1.5})
