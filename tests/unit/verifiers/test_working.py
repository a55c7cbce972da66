"""``worked_out``: a calculation on paper is seen in the forms that models write, and nothing else is taken for one. TRL
logs its mean as ``rewards/worked_out/mean``."""

from __future__ import annotations

import pytest

from grpo_lab.rewards import worked_out
from grpo_lab.rewards.arithmetic import MOST_READ, works_out

CALCULATES = [
    "Ann has 4*6=24 stamps.\n#### 24",
    r"so $3 \times 4 = 12$.",
    "That is 40 = 2*20.",
    "He gave 3*4 = <<3*4=12>>12 away",
    "现在有4*6=24个。\n#### 24",
    "3 apples + 2 apples = 5 apples",
    "3 x 4 = 12",
    r"\frac{3}{4} = 0.75",
    "4*6=25, which is wrong",
]
BLURTS = ["#### 24", "x = 24", "-5 = -5", "the answer is 3", r"\boxed{1/2}", "in 2020-2021", "x=3\ny-2", "", "1+"]


@pytest.mark.parametrize(
    ("text", "seen"), [*((text, True) for text in CALCULATES), *((text, False) for text in BLURTS)]
)
def test_calculations_are_seen_and_blurted_answers_are_none(text: str, seen: bool) -> None:
    assert works_out(text) is seen


def test_as_a_reward() -> None:
    chat = [[{"role": "assistant", "content": "2+3=5"}], [{"role": "assistant", "content": "#### 5"}]]
    assert worked_out(prompts=["", ""], completions=chat, solution=["5", "5"]) == [1.0, 0.0]
    assert worked_out(completions=["2+3=5", "#### 5"]) == [1.0, 0.0]
    assert not works_out(" " * MOST_READ + "2+3=5"), "only the beginning is read: a text costs no more than that"
