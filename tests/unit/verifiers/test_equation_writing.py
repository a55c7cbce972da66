"""Arithmetic as it is really written: currency, percent, LaTeX, mixed numbers, units, roundings, remainders. Never a
verdict that is not earned: what is not read is not judged."""

from __future__ import annotations

import time

import pytest

from grpo_lab.rewards.arithmetic import judged
from grpo_lab.rewards.plain_arithmetic import plain

pytestmark = pytest.mark.slow

LONG = 100_000


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ('5 apples + 3 apples = 8 apples', [True]),
        ('5 apples + 3 apples = 9 apples', [False]),
        ('12 km / 4 h = 3 km/h', []),
        ('12 km / 4 h = 4 km/h', []),
        ('$1,234.50 + $65.50 = $1,300.00', [True]),
        ('1,234,567 + 1 = 1,234,568', [True]),
        ('20% of 50 = 10', [True]),
        ('20% of 50 = 12', [False]),
        ('50 * 20% = 10', [True]),
        ('1/4 = 25%', [True]),
        ('0.25 = 25%', [True]),
        ('0.25 * 100 = 25%', [True]),
        ('100% - 20% = 80%', [True]),
        ('100% - 20% = 70%', [False]),
        ('$\\frac{3}{4} \\times 8 = 6$', [True]),
        ('\\dfrac{3}{4} \\cdot 8 = 7', [False]),
        ('\\frac34 + \\frac14 = 1', [True]),
        ('3\\frac{1}{2} + \\frac{1}{2} = 4', [True]),
        ('3 1/2 + 1/2 = 4', [True]),
        ('3 1/2 + 1/2 = 5', [False]),
        ('1 1/2 * 2 = 3', [True]),
        ('3½ + ½ = 4', [True]),
        ('½ × 6 = 3', [True]),
        ('½ × 6 = 4', [False]),
        ('3 × 4 = 12', [True]),
        ('3 x 4 = 12', [True]),
        ('3 X 4 = 13', [False]),
        ('7 − 9 = −2', [True]),
        ('7 – 9 = –2', [True]),
        ('7 - 9 = 2', [False]),
        ('10 / 3 ≈ 3.33', [True]),
        ('10 / 3 ≈ 3.3', [True]),
        ('10 / 3 ≈ 3', [True]),
        ('10 / 3 ≈ 4', [True]),
        ('10/3 = 3.33', [True]),
        ('10/3 = 3.34', [False]),
        ('2/3 = 0.67', [True]),
        ('17 / 5 = 3 remainder 2', [True]),
        ('17 / 5 = 3 R 2', [True]),
        ('17 ÷ 5 = 3 r 2', [True]),
        ('17 ÷ 5 = 3 r 1', [False]),
        ('17 / 5 = 3 with a remainder of 2', [True]),
        ('17 / 5 = 3 R2', [True]),
        ('17 mod 5 = 2', []),
        ('17 mod 5 = 3', []),
        ('17 % 5 = 2', []),
        ('a = b = c', []),
        ('2 + 3 = 5 = 10 / 2 = 6', [True, True, False]),
        ('2 + 3 = 4 + 1 = 5', [True, True]),
        ('€5 + €3 = €8', [True]),
        ('£5.50 * 2 = £11', [True]),
        ('5€ + 3€ = 8€', [True]),
        ('$5 + 50¢ = $5.50', []),
        ('2^3 = 8, 2³ = 8, 5² = 26', [True, True, False]),
        ('2^{10} = 1024', [True]),
        ('2^10 = 1000', [False]),
        ('√16 = 4', [True]),
        ('\\sqrt{16} = 4', [True]),
        ('\\sqrt{16} = 5', [False]),
        ('sqrt(16) = 4', [True]),
        ('5! = 120', [True]),
        ('(3 + 4) * 2 = 14', [True]),
        ('3(4) = 12', [True]),
        ('x = 3 + 4 = 7', [True]),
        ('x = 3 + 4 = 8', [False]),
        ('Let x = 5. Then 2x = 10.', []),
        ('total = 3 + 4 = 7', [True]),
        ('Total cost: 3 * $4 = $12.', [True]),
        ('He has 3 + 4 = 7 apples and 2 * 7 = 15 pears', [True, False]),
        ('3 + 4 = 7.', [True]),
        ('3+4=7,5+5=10', []),
        ('3+4=8,5+5=10', []),
        ('3 + 4 equals 7', []),
        ('**3 + 4 = 7**', [True]),
        ('`3 + 4 = 8`', [False]),
        ('3 * 4 = 12 (since 3 * 4 is 12)', [True]),
        ('1e3 + 1 = 1001', []),
        ('2:3 = 4:6', []),
        ('3 + 4 = 7 + 2 = 9', [False, True]),
        ('1 000 + 1 = 1 001', []),
        ('0.1 + 0.2 = 0.3', [True]),
        ('12 in. * 2 = 24 in.', []),
        ('60 mph * 2 hours = 120 miles', []),
        ('60 mph * 2 hours = 130 miles', []),
        ('3 dozen = 36', []),
        ('4 weeks = 28 days', []),
        ('1 hour = 60 minutes', []),
        ('2 hours * 60 minutes/hour = 120 minutes', []),
        ('10 - 4 apples = 6 apples', [True]),
        ('5 apples + 3 pears = 8 fruits', []),
        ('4 boxes with 6 apples = 24 apples', []),
        ('the 3 kids = 3 tickets', []),
        ('A = 5, B = A + 3 = 8', [True]),
        ('10:30 + 2 = 12:30', []),
        ('3.5 * 2 = 7.0', [True]),
        ('9 = 3^2', [True]),
        ('-3^2 = -9', [True]),
        ('(-3)^2 = 9', [True]),
        ('|3 - 5| = 2', []),
        ('7/0 = 0', []),
        ('5 + = 5', []),
        ('2 + 2 = five', []),
        ('100 * 1.05^2 = 110.25', [True]),
        ('100 * 1.05^3 = 115.76', [True]),
        ('1,5 + 1 = 2,5', []),
        ('3/4 of 20 = 15', [True]),
        ('half of 20 = 10', []),
        ('3 * 10^5 = 300,000', [True]),
        ('12 - 5 = 7 → 7 * 2 = 14', [True, True]),
        ('12 - 5 = 7 => 7 * 2 = 15', [True, False]),
        ('5 feet 3 inches = 63 inches', []),
        ('#### 3 + 4 = 7', [True]),
        ('2. 3 + 4 = 7', [True]),
        ('1) 3 + 4 = 8', [False]),
        ('Step 3: 3 + 4 = 7', [True]),
        ('- 3 + 4 = 7', [True]),
        ('• 3 + 4 = 7', [True]),
        ('3 + 4 = **7**', [True]),
        ('3 + 4 = \\boxed{7}', [True]),
        ('3 + 4 = \\boxed{8}', [False]),
        ('3 + 4 = ?', []),
        ('3 + ? = 7', []),
        ('3 + __ = 7', []),
        ('Speed = distance / time = 100 km / 2 h = 50 km/h', []),
        ('28 / 1/5 = 140', [True]),
        ('17/3 = 5 and 2/3 loads', [True]),
        ('2 + 3 = 5 and 1/4 = 0.25', [True, True]),
        ('$2.50 - $2.24 = 26 cents', [True]),
        ('$2.50 - $2.24 = 27 cents', [False]),
        ('3/3 - 2/3 = 1/3 of $150', []),
        ('$7,980 : $420 = 19', []),
        ('so 3/4 of 20 = 16', [False]),
        ('40 - 10% = 36', []),
        ('**3 * 4 = 12** and **5 + 5 = 11**', [True, False]),
        ('2**3 = 8 and 3**2 = 8', [True, False]),
        ('90° - 30° = 60°', [True]),
        ('3! = 6 and 4! = 25', [True, False]),
        ('20% of the 50 students = 10 students', []),
        ('10 - 4 apples = 7 apples', [False]),
        ('3 boxes with 5 apples = 15 apples', []),
        ('1,234 ≈ 1,200', [True]),
        ('2/3 ≈ 67%', [True]),
        ('2/3 ≈ 0.68', [False]),
        ('3\n- 4 * 5 = 20\n- 2 + 2 = 5', [True, False]),
        ('17 / 5 = 3 remainder 7', []),
        ('17 / 5 = 3 with some remainder left', []),
        ('3 1/2 * 2 = 7 and 3 1/2 * 2 = 8', [True, False]),
    ],
)  # fmt: skip
def test_as_it_is_written(text: str, verdicts: list[bool]) -> None:
    assert [equation.holds for equation in judged(text)] == verdicts


@pytest.mark.parametrize(
    "unit",
    [
        "9^9^9^9 = 1 ", "9^", "1 apples + ", "1 a = 1 a ", "1 abcdefghijklmnopqrst + ", "**", "**a", "√9", "½",
        "1 1/2 ", "1 and 1/2 ", "5! ", "= ≈ ", "\\frac12", "\\frac{1}{2}", "\\boxed{", "\\text{", "1%", "1-1%",
        "% of 1 ", "- 1\n", "\n", " ", "\t", "1:", "1,", "1,000", "3 of ", "of the ", "$1 = ", "$", "$1=1 cents",
        "17 / 5 = 3 r 2 ", "= 3 remainder", "9²", "⁹", "A = ", "<<1=1>>", "1=1+", "1 x 1", "2(", "/ 1/2 ", "\u202e",
        "\x00", "1 ",
    ],
)  # fmt: skip
def test_a_hostile_text_costs_its_length(unit: str) -> None:
    """100 kB of each; what is quadratic in it would take minutes, what is linear takes about a second here."""
    text = "1 + 1 = " + (unit * (LONG // len(unit) + 1))[:LONG]
    began = time.process_time()
    judged(text)
    assert time.process_time() - began < 30.0


def test_plain_text_stays() -> None:
    said = "She bought 3 pens. Then (2 + 3) * 4 - 5 / 6 = 7, A = 5; 2 + 2 == 5"
    assert plain(said) == said
