"""AccuracyReward reads what a number means: scale words, fractions, percents, units, shares, and several answers beside one.

Every row is judged in both modes; 1 is right, 0 is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_lab.rewards import AccuracyReward
from grpo_lab.verifiers.quantity import in_digits, read_quantity

PERCENT = [
    ("\\boxed{35.0\\%}", "35", 1),
    ("\\boxed{35\\%}", "35", 1),
    ("\\boxed{35.00\\%}", "35", 1),
    ("\\boxed{35}", "35\\%", 1),
    ("\\boxed{35.0}", "35\\%", 1),
    ("\\boxed{35.0\\%}", "35\\%", 1),
    ("\\boxed{35.0 \\%}", "35\\%", 1),
    ("\\boxed{35.5\\%}", "35\\%", 0),
    ("\\boxed{0.35}", "35\\%", 1),
    ("The answer is 35.0%.", "35", 1),
    ("The answer is 35.0 percent.", "35", 1),
    ("The answer is 35.0 per cent", "35", 1),
    ("#### 35.0%", "35", 1),
    ("The answer is $35.0\\%$", "35", 1),
    ("\\boxed{12.5\\%}", "12.5", 1),
    ("\\boxed{12.50\\%}", "12.5", 1),
    ("\\boxed{1,250.0\\%}", "1250", 1),
    ("\\boxed{-35.0\\%}", "-35", 1),
    ("\\boxed{\\frac{35}{1}\\%}", "35", 1),
    ("\\boxed{33\\frac{1}{3}\\%}", "33\\frac13", 1),
    ("\\boxed{33 1/3 %}", "\\frac{100}{3}", 1),
    ("\\boxed{thirty-five percent}", "35", 1),
    ("\\boxed{35.0\\text{ percent}}", "35", 1),
    ("\\boxed{35.0\\text{%}}", "35", 1),
    ("\\boxed{0.5\\%}", "0.5", 1),
    ("\\boxed{35 percentage points}", "35", 1),
    ("The answer is 35 percentage points.", "35", 1),
    ("\\boxed{350\\%}", "3.5", 1),
    ("\\boxed{35\\%}", "0.35", 1),
    ("\\boxed{35.0\\%}", "0.35", 1),
    ("\\boxed{35.0\\%}", "34", 0),
    ("\\boxed{34.9999\\%}", "35", 0),
]
WORDS = [
    ("The answer is 12 million.", "12", 0),
    ("The answer is 12 million.", "12000000", 1),
    ("\\boxed{12 million}", "12", 0),
    ("\\boxed{12 million}", "12000000", 1),
    ("\\boxed{12\\text{ million}}", "12", 0),
    ("\\boxed{12\\text{ million}}", "12,000,000", 1),
    ("#### 12 million", "12000000", 1),
    ("A: $12 million", "12000000", 1),
    ("The answer is $12 million dollars.", "12000000", 1),
    ("The answer is \\$12 million", "12000000", 1),
    ("The answer is $12$ million.", "12000000", 1),
    ("The answer is $12$ million.", "12", 0),
    ("The answer is 1.5 billion people.", "1500000000", 1),
    ("The answer is 1.5 billion people", "1.5", 0),
    ("\\boxed{3 dozen}", "36", 1),
    ("\\boxed{3 dozen}", "3", 0),
    ("The answer is 3 dozen eggs.", "36", 1),
    ("The answer is 3 dozens.", "36", 1),
    ("\\boxed{5 hundred}", "500", 1),
    ("\\boxed{5 hundred}", "5", 0),
    ("The answer is 5 thousand", "5000", 1),
    ("The answer is five thousand.", "5000", 1),
    ("The answer is a thousand.", "1000", 1),
    ("The answer is twelve.", "12", 1),
    ("The answer is twenty-one.", "21", 1),
    ("The answer is one hundred and five.", "105", 1),
    ("The answer is two hundred thousand", "200000", 1),
    ("The answer is half.", "\\frac12", 1),
    ("The answer is one half.", "0.5", 1),
    ("The answer is two thirds.", "\\frac{2}{3}", 1),
    ("The answer is two-thirds", "\\frac{2}{3}", 1),
    ("The answer is three quarters.", "0.75", 1),
    ("The answer is three-quarters of the cake.", "3/4", 1),
    ("The answer is 2 thirds.", "2", 0),
    ("The answer is 2 thirds", "\\frac23", 1),
    ("The answer is 3 and a half.", "3.5", 1),
    ("The answer is 3 and a half.", "3", 0),
    ("The answer is three and a half hours", "3.5", 1),
    ("The answer is 2 1/2 million", "2500000", 1),
    ("The answer is half a million", "500000", 1),
    ("The answer is a dozen", "12", 1),
    ("The answer is half a dozen", "6", 1),
    ("The answer is 2 trillion", "2000000000000", 1),
    ("The answer is 12 million", "12.000.000", 0),
    ("The answer is 3 score", "60", 1),
    ("The answer is 2 gross", "288", 1),
    ("The answer is 12M", "12000000", 1),
    ("The answer is 12M", "12", 0),
    ("The answer is 12k", "12000", 1),
    ("The answer is 12K", "12", 0),
    ("The answer is $5k", "5000", 1),
    ("The answer is 3 lakh", "300000", 1),
    ("The answer is 2 crore", "20000000", 1),
    ("The answer is 12 mln", "12000000", 1),
    ("The answer is 12 bn", "12000000000", 1),
    ("\\boxed{12}", "12 million", 0),
    ("\\boxed{12000000}", "12 million", 1),
    ("\\boxed{12 million}", "12 million", 1),
    ("\\boxed{12\\text{ million}}", "12\\text{ million}", 1),
    ("\\boxed{12}", "12\\text{ million}", 0),
    ("\\boxed{12\\text{ million dollars}}", "12000000", 1),
    ("\\boxed{\\$12\\text{ million}}", "12000000", 1),
    ("\\boxed{12{,}5 \\text{ million}}", "12", 0),
    ("\\boxed{12 \\text{ thousand}}", "12000", 1),
    ("\\boxed{12~\\text{million}}", "12000000", 1),
    ("\\boxed{12\\ \\text{million}}", "12000000", 1),
    ("\\boxed{12\\,\\text{million}}", "12000000", 1),
    ("\\boxed{12 \\mathrm{million}}", "12000000", 1),
    ("The answer is 5 and 1/2", "5.5", 1),
    ("The answer is 5 1/2 cups.", "5.5", 1),
    ("The answer is 5½", "5.5", 1),
    ("The answer is 12 eggs, and a dozen is 12", "12", 1),
]
SHARE = [
    ("\\boxed{12 \\times 10^6}", "12000000", 1),
    ("The answer is a ratio of 3:5", "5", 0),
    ("The answer is 8 out of 10.", "8", 0),
    ("The answer is 8 out of 10", "10", 0),
    ("#### 8 out of 10", "8", 0),
    ("\\boxed{8 \\text{ out of } 10}", "8", 0),
    ("\\boxed{8 out of 10}", "8", 0),
    ("A: 8 out of 10", "8", 0),
    ("<answer>8 out of 10</answer>", "8", 0),
    ("The answer is 8 out of 10", "0.8", 1),
    ("The answer is 8 out of 10", "\\frac{4}{5}", 1),
    ("The answer is 8 in 10", "8", 0),
    ("The answer is 1 in 5", "1", 0),
    ("The answer is 8 of 10", "8", 0),
    ("The answer is 8 per 10", "8", 0),
    ("The answer is 8 over 10", "0.8", 1),
    ("The answer is 8 times 10", "8", 0),
]
SEVERAL = [
    ("\\boxed{x=3 \\text{ and } y=5}", "5", 0),
    ("\\boxed{x=3 \\text{ and } y=5}", "3", 0),
    ("\\boxed{x=3, y=5}", "5", 0),
    ("\\boxed{x=3 \\text{ or } y=5}", "5", 0),
    ("\\boxed{x=3 and y=5}", "5", 0),
    ("\\boxed{x = 3 \\text{ and } x = 5}", "5", 0),
    ("\\boxed{x=3;\\ y=5}", "5", 0),
    ("\\boxed{x=3 \\quad y=5}", "5", 0),
    ("\\boxed{x=3 \\\\ y=5}", "5", 0),
    ("\\boxed{x=3 \\land y=5}", "5", 0),
    ("\\boxed{x=3\\text{, }y=5}", "5", 0),
    ("\\boxed{x=3 \\& y=5}", "5", 0),
    ("\\boxed{x=3 \\text{ and } 5}", "5", 0),
    ("\\boxed{3 \\text{ and } 5}", "5", 0),
    ("\\boxed{3 \\text{ and } 5}", "3", 0),
    ("\\boxed{3 \\text{ or } 5}", "5", 0),
    ("\\boxed{3 or 5}", "5", 0),
    ("\\boxed{3 \\lor 5}", "5", 0),
    ("The answer is x=3 and y=5.", "5", 0),
    ("The answer is $x=3$ and $y=5$.", "5", 0),
    ("The answer is $x=3$ and $y=5$.", "3", 0),
    ("The answer is 3 and 5.", "5", 0),
    ("The answer is 3 and 5.", "3", 0),
    ("The answer is 3 or 5", "3", 0),
    ("The answer is 3, 5", "3", 0),
    ("The answer is 3 apples and 5 pears.", "3", 0),
    ("The answer is 3 apples and 5 pears.", "5", 0),
    ("The answer is Tom: 3, Ann: 5", "5", 0),
    ("#### 3 and 5", "5", 0),
    ("#### 3 and 5", "3", 0),
    ("A: 3 and 5", "3", 0),
    ("<answer>3 and 5</answer>", "5", 0),
    ("<answer>x = 3 and y = 5</answer>", "5", 0),
    ("<answer>x = 3, y = 5</answer>", "5", 0),
    ("\\boxed{\\text{Tom: }3, \\text{Ann: }5}", "5", 0),
    ("\\boxed{\\text{Tom } 3 \\text{ and Ann } 5}", "5", 0),
    ("\\boxed{(3,5)}", "5", 0),
    ("\\boxed{x=3 \\text{ and } y=5}", "x=3, y=5", 1),
    ("\\boxed{3\\text{ and }5}", "3,5", 1),
    ("\\boxed{3 \\text{ hours and } 5 \\text{ minutes}}", "3", 0),
    ("\\boxed{3 \\text{ hours and } 5 \\text{ minutes}}", "5", 0),
    ("\\boxed{3 \\text{ hours } 5 \\text{ minutes}}", "3", 0),
    ("The answer is 3 hours and 5 minutes", "3", 0),
    ("The answer is 3 hours 5 minutes", "3", 0),
    ("The answer is 5 feet 3 inches", "5", 0),
    ("\\boxed{5'3''}", "5", 0),
    ("The answer is 5 to 7", "5", 0),
    ("The answer is 5-7", "5", 0),
    ("The answer is between 5 and 7", "7", 0),
    ("The answer is 3 R 2", "3", 0),
    ("The answer is 3 remainder 2", "3", 0),
    ("\\boxed{3 \\text{ remainder } 2}", "3", 0),
    ("The answer is 3:5", "3", 0),
    ("The answer is 3 to 5", "3", 0),
    ("The answer is 3 / 5", "3", 0),
    ("A: -10 °F", "-10", 1),
    ("\\boxed{5\\,\\text{m/s}^2}", "5", 1),
    ("\\boxed{5 square feet}", "5", 1),
]
SENTENCE_AFTER = [
    ("#### 30. Jeff walks 3 miles.", "30", 1),
    ("#### 30. Jeff walks to school 3 times", "30", 1),
    ("#### 30. So the answer is 30", "30", 1),
    ("#### 30 \n", "30", 1),
    ("#### 30.", "30", 1),
    ("A: 30. Jeff walks 3 miles.", "30", 1),
    ("#### $30. Jeff walks", "30", 1),
    ("#### 30.5. Jeff walks", "30.5", 1),
    ("#### 30, Jeff walks", "30", 1),
    ("#### 30 - Jeff walks 3 miles", "30", 1),
    ("#### 30 (Jeff walks 3 miles)", "30", 1),
    ("### 30", "30", 0),
]
UNITS = [
    ("\\boxed{35.0}", "35", 1),
    ("\\boxed{0.35}", "35", 0),
    ("The answer is 3 pairs", "3", 1),
    ("\\boxed{x = y = 5}", "5", 1),
    ("\\boxed{x=2+3=5}", "5", 1),
    ("The answer is -10°F.", "-10", 1),
    ("\\boxed{-10°F}", "-10", 1),
    ("\\boxed{-10^\\circ F}", "-10", 1),
    ("\\boxed{-10^\\circ\\text{F}}", "-10", 1),
    ("\\boxed{-10^{\\circ}\\mathrm{F}}", "-10", 1),
    ("The answer is 20 °C.", "20", 1),
    ("\\boxed{20 °C}", "20", 1),
    ("\\boxed{20^\\circ C}", "20", 1),
    ("\\boxed{20\\,^\\circ\\mathrm{C}}", "20", 1),
    ("\\boxed{20~^{\\circ}\\text{C}}", "20", 1),
    ("\\boxed{20\\ \\text{°C}}", "20", 1),
    ("\\boxed{20 ℃}", "20", 1),
    ("\\boxed{20℉}", "20", 1),
    ("#### -10°F", "-10", 1),
    ("<answer>-10°F</answer>", "-10", 1),
    ("<answer>20 °C</answer>", "20", 1),
    ("The answer is 20 degrees Celsius.", "20", 1),
    ("\\boxed{20 degrees Celsius}", "20", 1),
    ("\\boxed{20\\text{ degrees Celsius}}", "20", 1),
    ("\\boxed{293 K}", "293", 1),
    ("\\boxed{45^\\circ}", "45", 1),
    ("\\boxed{45°}", "45", 1),
    ("\\boxed{45 ^\\circ}", "45", 1),
    ("\\boxed{-10°F}", "10", 0),
    ("The answer is 20 °C", "21", 0),
    ("\\boxed{20°C}", "20^\\circ C", 1),
    ("\\boxed{20}", "20^\\circ\\text{C}", 1),
    ("\\boxed{20}", "20°C", 1),
    ("\\boxed{5 m/s}", "5", 1),
    ("\\boxed{5\\text{ m/s}}", "5", 1),
    ("\\boxed{5 km/h}", "5", 1),
    ("\\boxed{5\\ \\mathrm{km/h}}", "5", 1),
    ("\\boxed{5 kWh}", "5", 1),
    ("\\boxed{5 \\Omega}", "5", 1),
    ("\\boxed{5 Ω}", "5", 1),
    ("\\boxed{5 µm}", "5", 1),
    ("\\boxed{5 cm²}", "5", 1),
    ("\\boxed{5 cm^2}", "5", 1),
    ("\\boxed{5\\text{ cm}^3}", "5", 1),
    ("\\boxed{5 sq ft}", "5", 1),
    ("\\boxed{5¢}", "5", 1),
    ("\\boxed{5 ¢}", "5", 1),
    ("\\boxed{5 €}", "5", 1),
    ("\\boxed{€5}", "5", 1),
    ("The answer is 5¢.", "5", 1),
    ("The answer is 5 m/s.", "5", 1),
    ("The answer is 5 miles per hour.", "5", 1),
    ("\\boxed{5 miles per hour}", "5", 1),
    ("The answer is 60 km/h", "60", 1),
    ("The answer is -5 °C", "-5", 1),
    ("The answer is −5°C", "-5", 1),
    ("The answer is minus 5 degrees", "-5", 1),
    ("The answer is negative 5", "-5", 1),
    ("The answer is $5/hour", "5", 1),
    ("The answer is $5 per hour", "5", 1),
    ("\\boxed{\\$5 \\text{ per hour}}", "5", 1),
    ("\\boxed{5 mi}", "5", 1),
    ("\\boxed{5 yd}", "5", 1),
    ("\\boxed{5 gal}", "5", 1),
    ("\\boxed{5 L}", "5", 1),
    ("\\boxed{5 V}", "5", 1),
    ("\\boxed{5 N}", "5", 1),
    ("\\boxed{5 J}", "5", 1),
    ("\\boxed{5 W}", "5", 1),
    ("\\boxed{5 Hz}", "5", 1),
    ("\\boxed{5\\text{ }\\Omega}", "5", 1),
    ("\\boxed{5 \\text{ mol}}", "5", 1),
    ("\\boxed{5x}", "5", 0),
    ("\\boxed{5 a}", "5", 0),
    ("\\boxed{5n}", "5", 0),
    ("\\boxed{5\\pi}", "5", 0),
    ("\\boxed{5 \\text{ km} \\cdot \\text{h}^{-1}}", "5", 1),
    ("\\boxed{5'}", "5", 1),
    ('\\boxed{5"}', "5", 1),
    ("\\boxed{5 pm}", "5", 1),
    ("\\boxed{5 a.m.}", "5", 1),
    ("The answer is 18 because 3 + 15 = 18.", "18", 1),
]
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


@pytest.fixture(scope="module")
def rewards() -> Iterator[dict[str, AccuracyReward]]:
    made = {mode: AccuracyReward(mode, workers=1) for mode in ("strict", "lenient")}
    yield made
    for reward in made.values():
        reward.close()


@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.parametrize("kind", ["PERCENT", "WORDS", "SHARE", "SEVERAL", "SENTENCE_AFTER", "UNITS"])
def test_a_completion_against_a_gold(rewards: dict[str, AccuracyReward], kind: str, mode: str) -> None:
    cases = globals()[kind]
    judged = rewards[mode].judge([case[0] for case in cases], [case[1] for case in cases])
    wrong = [(case, one.answer, one.reason) for case, one in zip(cases, judged, strict=True) if one.reward != case[2]]
    assert wrong == []


def test_golds_in_words_percents_and_variables(rewards: dict[str, AccuracyReward]) -> None:
    judged = rewards["strict"].judge([f"\\boxed{{{answer}}}" for _, answer, _ in GOLDS], [gold for gold, _, _ in GOLDS])
    assert [(case, one.reason) for case, one in zip(GOLDS, judged, strict=True) if one.reward != case[2]] == []


def test_two_statements_are_no_single_answer(rewards: dict[str, AccuracyReward]) -> None:
    judged = rewards["strict"].judge([case[0] for case in STRICT_ONLY], [case[1] for case in STRICT_ONLY])
    assert [(case, one.answer) for case, one in zip(STRICT_ONLY, judged, strict=True) if one.reward != case[2]] == []


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("So it costs 12 million.", "12", 0),
        ("So it costs 12 million.", "12000000", 1),
        ("She needs 3 dozen", "36", 1),
        ("He got 8 out of 10.", "10", 0),
        ("It is 17 or 18.", "18", 0),
        ("It is between 5 and 7", "7", 0),
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
