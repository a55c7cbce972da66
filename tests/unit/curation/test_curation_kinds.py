"""Question kinds on hand-written questions of every shape the rules name, and on hostile text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.curation import question_kind
from grpo_lab.curation.question_kinds import KINDS

OPEN = [
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts does it take?",
    "For what values of $x$ is it true that $x^2 \\le 10$? Express your answer in interval notation.",
    "Is $f(x) = x^3$ even, odd, or neither?",
    "Can you tell me how many apples Tom has?",
    "Which of the following numbers is not prime: 2, 3, 4?",
    "There are 20 true/false questions worth 2 points each. How many points can Amy get?",
    "Determine if the graph of $x^2 + y^2 = 4$ is a parabola, circle, ellipse, or line.",
    "Which point, $A$, $B$ or $C$, is closest to the origin?",
    "She decides to go with the option of paying 70 pesos. How much money would she save?",
    "If Mia, who is younger than Emma, is 40 years old, what's the average of their ages?",
    "She wants to show that she can read 20 pages a day. How many pages does she read in a week?",
    "((8 * 9 * 0 - -1) - (-9 - -7 + -4 - 8)) =",
    "农民伯伯上午摘了16筐番茄，下午又摘了6筐。现在一共有多少筐番茄？",
    "在 $(2 x^{3}+1/x)^{6}$ 的展开式中, $x^{6}$ 的系数是 $(\\quad)$.",
    "Find $P(A)$, $P(B)$ and $P(C)$.",
    'Find the area.\n\n[asy] label("(A)", a); label("(B)", b); label("(C)", c); [/asy]',
    "(a) Find $x$. (b) Find $y$. (c) Find $z$.",
]
MULTIPLE_CHOICE = [
    "What is 2 + 2?\nA) 3\nB) 4\nC) 5\nD) 6",
    "What is 2 + 2? A. 3 B. 4 C. 5 D. 6",
    "What is 2 + 2? $\\textbf{(A)}\\ 3\\qquad\\textbf{(B)}\\ 4\\qquad\\textbf{(C)}\\ 5$",
    "已知 m=√27-√3，则实数m的范围是（）\nA.2<m<3  B.3<m<4  C.4<m<5  D.5<m<6",
    "下列计算正确的是（）. A. 1 B. 2 C 3 D. 4",  # one marker lost its dot
    "Which code is optimal? (a) {0, 10}. (b) {00, 01}. (c) {0, 1}.",
    "Which is the graph of $y = f(2x)$?\n\nEnter the letter of the graph of $y = f(2x)$.",
    'What curve is it? Enter "C" for circle, "P" for parabola, and "E" for ellipse.',
    "Which of these is least: $A = 1$, $B = 2$, $C = 3$? Enter your answer as $A$, $B$, or $C$.",
    "Which fruit is red?\nOptions:\n- apple\n- banana\n- plum",
    "Statement 1| A. Statement 2| B.\nA. True, True\nB. False, False\nC. True, False\nD. False, True",
]
TRUE_FALSE = [
    "Two sets are separable if and only if their convex hulls are disjoint. True or False?",
    "True or false: every bounded sequence converges.",
    "Does $x^5 + x - 1$ have any real roots?",
    "If you follow these instructions, do you return to the start? Take 2 steps. Turn around.\nOptions:\n- Yes\n- No",
    "Is 7 prime?\nA. True\nB. False",
    "Would Hades and Osiris hypothetically compete for real estate in the Underworld?",
    "Did Franklin D. Roosevelt own a dog?",
    "not ( False or False or True ) is",
    "Janet has 3 apples and Tom has 2. Does Janet have more?",
    "Let $V$ be a space. Determine whether $V$ is finite dimensional.",
    "判断对错: 1+1=3",
]
PROOF = [
    "Prove that there are infinitely many primes.",
    "Let $G$ be a group of order 15. Show that $G$ is cyclic.",
    "If $a, b > 0$, prove that $a + b \\ge 2\\sqrt{ab}$.",
    "For $x$ an element in $G$ show that $x$ and $x^{-1}$ have the same order.",
    "Prove or disprove: every group of order 4 is cyclic.",
    "证明: 若 $x>0$, 则 $x+1>1$.",
    "Every compact subset of a Hausdorff space is closed, for every space $X$.",
    "Suppose that:\n(a) $a_0 = 0$;\n(b) $a_1 = 1$; and\n(c) $a_2 = 2$.\n\nProve that $a_3 = 3$.",
]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("open", t) for t in OPEN]
    + [("multiple_choice", t) for t in MULTIPLE_CHOICE]
    + [("true_false", t) for t in TRUE_FALSE]
    + [("proof", t) for t in PROOF],
)
def test_the_kind_of_a_question(kind: str, text: str) -> None:
    assert question_kind(text) == kind


@pytest.mark.not_fast
@given(st.text(alphabet=st.characters(), max_size=300))
@settings(max_examples=200, deadline=None)
def test_every_text_has_a_kind(text: str) -> None:
    assert question_kind(text) in KINDS


@pytest.mark.parametrize(
    "piece",
    [
        "A) ", "(A)(B)(C)", "\\text{", "[asy]", "true ", " ", "\n", "?", ",a", "(\\quad ", "if ", "yes,,,",
        "Options:\n- a",
    ],
)  # fmt: skip
def test_hostile_text_takes_no_time(piece: str) -> None:
    started = time.process_time()
    assert question_kind(piece * (100_000 // len(piece)) + "x") in KINDS
    assert time.process_time() - started < 2  # 0.1 s here; quadratic patterns take minutes


def test_a_question_is_a_string() -> None:
    with pytest.raises(ValueError, match="list"):
        question_kind(["Is it?"])  # type: ignore[arg-type]
