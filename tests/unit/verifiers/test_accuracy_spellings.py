"""Spellings that are read since they are not in doubt, each with neighbours that must earn nothing."""

from __future__ import annotations

import pytest

from grpo_lab.rewards import AccuracyReward
from grpo_lab.rewards.math.accuracy import gold_answer

PAID = {
    "A": [
        "(A) 5 apples", r"\textbf{(A)}\ 5", r"\textbf{(A) }5", r"\mathrm{(A)}\ \frac{1}{2}", "A. 5", r"\text{A}: 5",
        r"(\text{A}) 5", "(A) Anna and Bob",
    ],
    "5": [r"\textbf{(A)}\ 5", "(A) 5", "A) 5", "(A) 5 apples"],
    r"\textbf{(A)}\ 5": ["A", "(A)", "5", r"\textbf{(A)}\ 5", "(A) 5 apples"],
    "(A) 5 apples": ["A", "5 apples", "5"],
    "1234567": [
        "1.234.567", "1 234 567", "1~234~567", r"1\ 234\ 567", "12,34,567", "1_234_567", "1'234'567", "1.234.567,0",
    ],
    "12345": ["12 345", "12~345", "12 345 km"],
    "1234.56": ["1.234,56", "1 234,56"],
    r"\emptyset": [r"\varnothing", "∅", r"\{\}", r"\{ \}"],
    r"\varnothing": [r"\emptyset"],
    r"\frac{1}{3}": [r"0.\overline{3}", r"0.\bar{3}", r"0.\dot{3}", "0.(3)", r"0.3\overline{3}", r".\overline{3}"],
    r"\frac{1}{7}": [r"0.\dot{1}4285\dot{7}", r"0.\overline{142857}"],
    r"-\frac{7}{6}": [r"-1.1\overline{6}"],
    r"0.\overline{3}": [r"\frac13", "0.333333"],
    "1": [r"0.\overline{9}"],
    r"\frac{1}{\sqrt{n}}": [r"\sqrt{1/n}", r"\sqrt{\frac{1}{n}}"],
    r"-\ln x": [r"\ln\frac{1}{x}"],
    r"\ln 2": [r"\log_e 2", r"\log_{\mathrm{e}}2", r"\log_e(2)"],
    r"\log_e 2": [r"\ln 2", "0.693147"],
}  # fmt: skip
UNPAID = {
    "A": [
        "(B) 5", "(A) or (B)", "(A) 5 (B) 6", "(A) not B", "(A) is wrong", "(A)(B)", "(A), (B)", "(A) & (B)", "(A) B",
        "A. B. C.", r"\textbf{(A)}\ \textbf{(B)}", "(A) 5 or B", "either A or B", "A/B", "A, B", "(A) + 5",
        "(A) and (C) 5",
        "5", r"\textbf{(B)}\ A", "(A) 1 B. 2",
    ],
    "5": ["(A) 6", "(A) 5 or 6", "(A) 4 (B) 5", r"\textbf{(A)}\ 6", "(5) A", "(A) 5, (B) 6", "A: 5, B: 6"],
    r"\textbf{(A)}\ 5": ["B", "6", r"\textbf{(B)}\ 5", r"\textbf{(A)}\ 6", "(B) 5", "5 or 6", "(A) or (B)"],
    "(A) 5 apples": ["(B) 5 apples", "(A) 6 pears", "(B)", "6"],
    "1234567": ["1.234567", "1, 234, 567", "1.234.568", "12,34,568", "123,4567", "1.23.4567", "1 234 568", "1234.567"],
    "12345": ["12.345", "12, 345", "12 34 5", "12"],
    "12": ["12 345 people", "12,34,567"],
    "12.345": ["12,345", "12345"],
    "(12,34,567)": ["1234567"],
    r"\emptyset": ["0", r"\{0\}", r"\{\emptyset\}", r"\{1\}"],
    r"\frac{1}{3}": ["0.333...", r"0.\overline{34}", r"0.3\overline{4}", "0.3", "0.33", "0.(4)"],
    "0.6": [r"0.1\overline{6}"],
    r"\frac{1}{6}": ["0.1(6)"],
    "1": [r"0.\overline{8}", "0.99", "1.234.567 Euro", "1 234 567 people"],
    r"\frac{1}{\sqrt{n}}": [r"-\sqrt{1/n}", r"\sqrt{n}", r"\sqrt{1/m}", "1/n", r"\sqrt{-1/n}"],
    "|x|": ["x", "-x"],
    r"\sqrt{x^2}": ["x"],
    r"\sqrt{x}\sqrt{y}": [r"\sqrt{xy}"],
    r"2\ln x": [r"\ln(x^2)"],
    r"\ln 2": [r"\log_{10} 2", r"\log_e 3", r"\log_2 e", r"\log_e 2e"],
}  # fmt: skip


@pytest.mark.parametrize(("table", "paid"), [(PAID, 1.0), (UNPAID, 0.0)], ids=["paid", "unpaid"])
def test_in_a_box_and_in_a_sentence(strict: AccuracyReward, table: dict[str, list[str]], paid: float) -> None:
    pairs = [(gold, answer) for gold, answers in table.items() for answer in answers]
    golds = [gold for gold, _ in pairs]
    found = strict(completions=[rf"\boxed{{{answer}}}" for _, answer in pairs], solution=golds)
    assert [pair for pair, one in zip(pairs, found, strict=True) if one != paid] == []
    if paid == 0.0:  # a sentence ends at its full stop: what is behind `A. B.` is another one's
        pairs = [(gold, answer) for gold, answer in pairs if ". " not in answer]
        golds = [gold for gold, _ in pairs]
        said = strict(completions=[f"The answer is {answer}." for _, answer in pairs], solution=golds)
        assert [pair for pair, one in zip(pairs, said, strict=True) if one != paid] == []


@pytest.mark.parametrize(
    "said",
    ["The answer is (A) 5 apples.", "The answer is **(A)** 5 apples", "#### (A) 5", "<answer>(A) 5 apples</answer>"],
)
def test_a_choice_in_other_words(strict: AccuracyReward, said: str) -> None:
    assert strict(completions=[said] * 4, solution=["A", "5", "B", "6"]) == [1.0, 1.0, 0.0, 0.0]


def test_a_gold_keeps_its_letter() -> None:
    assert gold_answer("(A) 5 apples") == "(A) 5 apples"
    assert gold_answer(r"So it is $\boxed{\textbf{(A)}\ 5}$.") == r"\textbf{(A)}\ 5"
    assert gold_answer("A: 18") == "18"
