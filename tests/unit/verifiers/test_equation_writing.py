"""Arithmetic as it is really written: currency, percent, LaTeX, mixed numbers, units, roundings, remainders. Never a
verdict that is not earned: what is not read is not judged."""

from __future__ import annotations

import time

import pytest

from grpo_lab.rewards.arithmetic import judged
from grpo_lab.rewards.plain_arithmetic import plain

pytestmark = pytest.mark.slow

LONG = 50_000

RIGHT = [
    "5 apples + 3 apples = 8 apples", "$1,234.50 + $65.50 = $1,300.00", "1,234,567 + 1 = 1,234,568", "20% of 50 = 10",
    "50 * 20% = 10", "1/4 = 25%", "0.25 = 25%", "0.25 * 100 = 25%", "100% - 20% = 80%", r"$\frac{3}{4} \times 8 = 6$",
    r"\frac34 + \frac14 = 1", r"3\frac{1}{2} + \frac{1}{2} = 4", "3 1/2 + 1/2 = 4", "1 1/2 * 2 = 3", "3½ + ½ = 4",
    "½ × 6 = 3", "3 × 4 = 12", "3 x 4 = 12", "7 − 9 = −2", "7 – 9 = –2", "10 / 3 ≈ 3.33", "10 / 3 ≈ 3.3", "10 / 3 ≈ 3",
    "10 / 3 ≈ 4", "10/3 = 3.33", "2/3 = 0.67", "17 / 5 = 3 remainder 2", "17 / 5 = 3 R 2", "17 ÷ 5 = 3 r 2",
    "17 / 5 = 3 with a remainder of 2", "17 / 5 = 3 R2", "€5 + €3 = €8", "£5.50 * 2 = £11", "5€ + 3€ = 8€",
    "2^{10} = 1024", "√16 = 4", r"\sqrt{16} = 4", "sqrt(16) = 4", "5! = 120", "(3 + 4) * 2 = 14", "3(4) = 12",
    "x = 3 + 4 = 7", "total = 3 + 4 = 7", "Total cost: 3 * $4 = $12.", "3 + 4 = 7.", "**3 + 4 = 7**",
    "3 * 4 = 12 (since 3 * 4 is 12)", "0.1 + 0.2 = 0.3", "10 - 4 apples = 6 apples", "A = 5, B = A + 3 = 8",
    "3.5 * 2 = 7.0", "9 = 3^2", "-3^2 = -9", "(-3)^2 = 9", "100 * 1.05^2 = 110.25", "100 * 1.05^3 = 115.76",
    "3/4 of 20 = 15", "3 * 10^5 = 300,000", "#### 3 + 4 = 7", "2. 3 + 4 = 7", "Step 3: 3 + 4 = 7", "- 3 + 4 = 7",
    "• 3 + 4 = 7", "3 + 4 = **7**", r"3 + 4 = \boxed{7}", "28 / 1/5 = 140", "17/3 = 5 and 2/3 loads",
    "$2.50 - $2.24 = 26 cents", "90° - 30° = 60°", "1,234 ≈ 1,200", "2/3 ≈ 67%",
    r"\frac{1}{2} + \frac{1}{3} = \frac{5}{6}", "1,000 * 3 = 3,000", "18 / 450 * 100 = 4%",
]  # fmt: skip
WRONG = [
    "5 apples + 3 apples = 9 apples", "20% of 50 = 12", "100% - 20% = 70%", r"\dfrac{3}{4} \cdot 8 = 7",
    "3 1/2 + 1/2 = 5", "½ × 6 = 4", "3 X 4 = 13", "7 - 9 = 2", "10/3 = 3.34", "17 ÷ 5 = 3 r 1", "2^10 = 1000",
    r"\sqrt{16} = 5", "x = 3 + 4 = 8", "`3 + 4 = 8`", "1) 3 + 4 = 8", r"3 + 4 = \boxed{8}", "$2.50 - $2.24 = 27 cents",
    "so 3/4 of 20 = 16", "10 - 4 apples = 7 apples", "2/3 ≈ 0.68", r"\left(2 \times 3\right) = 7",
]  # fmt: skip
NOT_JUDGED = [
    "12 km / 4 h = 3 km/h", "12 km / 4 h = 4 km/h", "17 mod 5 = 2", "17 mod 5 = 3", "17 % 5 = 2", "a = b = c",
    "$5 + 50¢ = $5.50", "Let x = 5. Then 2x = 10.", "3+4=7,5+5=10", "3+4=8,5+5=10", "3 + 4 equals 7", "1e3 + 1 = 1001",
    "2:3 = 4:6", "1 000 + 1 = 1 001", "12 in. * 2 = 24 in.", "60 mph * 2 hours = 120 miles",
    "60 mph * 2 hours = 130 miles", "3 dozen = 36", "4 weeks = 28 days", "1 hour = 60 minutes",
    "2 hours * 60 minutes/hour = 120 minutes", "5 apples + 3 pears = 8 fruits", "4 boxes with 6 apples = 24 apples",
    "the 3 kids = 3 tickets", "10:30 + 2 = 12:30", "|3 - 5| = 2", "7/0 = 0", "5 + = 5", "2 + 2 = five", "1,5 + 1 = 2,5",
    "half of 20 = 10", "5 feet 3 inches = 63 inches", "3 + 4 = ?", "3 + ? = 7", "3 + __ = 7",
    "Speed = distance / time = 100 km / 2 h = 50 km/h", "3/3 - 2/3 = 1/3 of $150", "$7,980 : $420 = 19",
    "40 - 10% = 36", "20% of the 50 students = 10 students", "3 boxes with 5 apples = 15 apples",
    "17 / 5 = 3 remainder 7", "17 / 5 = 3 with some remainder left", "A = 5\nA - B = 4", "23 slices x $4 = $92",
    "5 apples + 3 = 8", "3 apples - 5 = 3", "250 = (5/2)x and 9x-21=339", "x = 5, 2x + 3 = 13",
    "2 + 2 == 5, a >= 3 + 1, 3 != 4", "1 / 0 = 7", "= = =", "",
]  # fmt: skip
SEVERAL = {
    "2 + 3 = 5 = 10 / 2 = 6": [True, True, False],
    "2 + 3 = 4 + 1 = 5": [True, True],
    "2^3 = 8, 2³ = 8, 5² = 26": [True, True, False],
    "He has 3 + 4 = 7 apples and 2 * 7 = 15 pears": [True, False],
    "3 + 4 = 7 + 2 = 9": [False, True],
    "12 - 5 = 7 → 7 * 2 = 14": [True, True],
    "12 - 5 = 7 => 7 * 2 = 15": [True, False],
    "2 + 3 = 5 and 1/4 = 0.25": [True, True],
    "**3 * 4 = 12** and **5 + 5 = 11**": [True, False],
    "2**3 = 8 and 3**2 = 8": [True, False],
    "3! = 6 and 4! = 25": [True, False],
    "3\n- 4 * 5 = 20\n- 2 + 2 = 5": [True, False],
    "3 1/2 * 2 = 7 and 3 1/2 * 2 = 8": [True, False],
    "4 * $10.00 = $40.00. That makes 40 + 3 = 44.": [True, False],
    "30 / 3500 = <<30/3500=.01>>.01 pounds": [True, True],
    "$40.00 - 10% of $40.00 = $40.00 - $4.00 = $36.00.": [True, True],
    "A = (2 + 3) = 5, B = 4. Then A * B = 5 * 4 = 21": [True, True, False],
    "12 / 4 = 3 apples and 3 + 1 = 5 pears": [True, False],
    "10x6=60, 16 x .5 = 8, 3 X 3 = 10": [True, True, False],
    "1/3 = 0.33 but 1/3 = 0.34, and 10/3 = 3": [True, False, False],
    "-8 - -6 = -8 + 6 = -2": [True, True],
    "2^10 = 1024 and 2**3 = 9": [True, False],
}


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        *((text, [True]) for text in RIGHT),
        *((text, [False]) for text in WRONG),
        *((text, []) for text in NOT_JUDGED),
        *SEVERAL.items(),
    ],
)
def test_as_it_is_written(text: str, verdicts: list[bool]) -> None:
    assert [equation.holds for equation in judged(text)] == verdicts


@pytest.mark.parametrize(
    "unit",
    [
        "9^9^9^9 = 1 ", "9^", "1 apples + ", "1 a = 1 a ", "1 abcdefghijklmnopqrst + ", "**", "**a", "√9", "½",
        "1 1/2 ", "1 and 1/2 ", "5! ", "= ≈ ", "\\frac12", "\\frac{1}{2}", "\\boxed{", "\\text{", "1%", "1-1%",
        "% of 1 ", "- 1\n", "\n", " ", "\t", "1:", "1,", "1,000", "3 of ", "of the ", "$1 = ", "$", "$1=1 cents",
        "17 / 5 = 3 r 2 ", "= 3 remainder", "9²", "⁹", "A = ", "<<1=1>>", "1=1+", "1 x 1", "2(", "/ 1/2 ", "\u202e",
        "\x00", "1 ", "(", "=",
    ],
)  # fmt: skip
def test_a_hostile_text_costs_its_length(unit: str) -> None:
    """50 kB of each: what is quadratic in it takes minutes, what is linear about a second."""
    text = "1 + 1 = " + (unit * (LONG // len(unit) + 1))[:LONG]
    began = time.process_time()
    judged(text)
    assert time.process_time() - began < 30.0


def test_plain_text_stays() -> None:
    said = "She bought 3 pens. Then (2 + 3) * 4 - 5 / 6 = 7, A = 5; 2 + 2 == 5"
    assert plain(said) == said
