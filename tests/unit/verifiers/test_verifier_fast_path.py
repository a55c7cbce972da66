"""The fast path never changes a verdict: compared with math-verify itself, in this process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.verifiers.canonical import canonical
from grpo_lab.verifiers.exact_numbers import compare_numbers, compare_plain_numbers, is_plain_number
from grpo_lab.verifiers.math_equality import compare_in_worker
from grpo_lab.verifiers.side_by_side import read_together


def by_math_verify(gold: str, answer: str) -> bool:
    return compare_in_worker({"gold": gold, "answer": answer})["verdict"] == "equal"


def spelled(whole: int, places: str, commas: bool, sign: str) -> str:
    return sign + (f"{whole:,}" if commas else str(whole)) + places


numbers = st.builds(
    spelled,
    st.one_of(st.integers(0, 12), st.integers(0, 10**7)),
    st.one_of(st.just(""), st.just(".0"), st.from_regex(r"\.[0-9]{1,7}", fullmatch=True)),
    st.booleans(),
    st.sampled_from(["", "-", "+"]),
)
neighbours = st.builds(
    lambda whole, digits, by: (f"{whole}.{digits:07d}", f"{whole}.{(digits + by) % 10**7:07d}"),
    st.integers(0, 99),
    st.integers(0, 10**7 - 1),
    st.integers(0, 30),  # up to 3e-6 apart: around math-verify's rounding to six places
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.one_of(st.tuples(numbers, numbers), neighbours, numbers.map(lambda text: (text, text))))
def test_agrees_with_math_verify_wherever_it_decides(pair: tuple[str, str]) -> None:
    decided = compare_plain_numbers(*pair)
    if decided is not None:
        assert decided == by_math_verify(*pair)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("18", "18", True),
        ("18", "18.0", True),
        ("1,800", "1800", True),
        ("025", "25", True),
        ("-0", "0", True),
        ("18", "19", False),
        ("18", "-18", False),
        ("1800", "1.8", False),
        ("0.5", "0.51", False),
        ("0.3333333", "0.3333334", None),  # 1e-7 apart: alike after rounding to six places, so not ours to say
        ("0.0000672", "0.0000673", False),  # below 0.1, six decimals are counted from the first significant digit
        ("0.05", "0.050001", False),
        ("0.05", "0.05000001", None),
        ("12345678901234567", "12345678901234568", None),  # more digits than a double holds
        ("10%", "10", None),
        ("1/2", "0.5", None),
        ("1,23", "123", None),
        ("1000", "+1,000", None),  # math-verify reads this as a list; the canonical spelling has lost the plus by now
    ],
)
def test_by_hand(gold: str, answer: str, verdict: bool | None) -> None:
    assert compare_plain_numbers(gold, answer) is verdict


@pytest.mark.parametrize("text", ["", "-", ".", ",", "1,0000", "1e5", "x", "1.2.3", "٣", "1 000", "--1"])
def test_not_plain(text: str) -> None:
    assert not is_plain_number(text)


small, under = st.integers(0, 400), st.integers(1, 400)
forms = st.one_of(
    numbers,
    st.builds("{}/{}".format, small, under),
    st.builds(r"\frac{{{}}}{{{}}}".format, st.integers(-40, 40), under),
    st.builds(r"-\frac{{{}}}{{{}}}".format, small, under),
    st.builds(r"\frac{}{}".format, st.integers(0, 9), st.integers(1, 9)),
    st.builds(r"{}\frac{{{}}}{{{}}}".format, small, small, under),
    st.builds(r"{}\pi".format, under),
    st.builds(r"{}\sqrt{{{}}}".format, under, small),
    st.builds(r"\sqrt{{{}}} + {}\sqrt{{{}}}".format, small, under, small),
    st.builds(r"{} - \frac{{{}\pi}}{{{}}}".format, small, under, under),
    st.builds(r"\frac{{\sqrt{{{}}}}}{{{}}}".format, small, under),
)
answers = st.one_of(forms, st.lists(forms, min_size=2, max_size=3).map(", ".join))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.one_of(st.tuples(forms, answers), forms.map(lambda text: (text, text))))
def test_fractions_roots_and_lists_agree_with_math_verify_wherever_they_are_decided(pair: tuple[str, str]) -> None:
    decided = compare_numbers(*pair)
    if decided is not None:
        assert decided == by_math_verify(*pair)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("\\frac{3}{8}", "6/16", True),
        ("\\frac{3}{8}", "\\frac{5}{16}", False),
        ("12\\frac{3}{5}", "\\frac{63}{5}", True),
        ("12\\frac{3}{5}", "\\frac{36}{5}", False),  # not the product
        ("7\\pi", "7\\pi", None),  # roots and pi are sympy's
        ("28", "\\sqrt{34} + 3\\sqrt{10}", None),
        ("\\frac{1}{2}", "0.5", None),
        ("\\frac{1}{2}", "0.51", False),
        ("3", "3, 4", None),  # one of them is the gold
        ("3", "4, 5", False),
        ("1234", "1, 234", None),  # perhaps 1,234
        ("1/0", "1/0", None),
        ("83", "10.02609801394532", False),
        ("x", "3", None),
    ],
)
def test_exact_numbers_by_hand(gold: str, answer: str, verdict: bool | None) -> None:
    assert compare_numbers(gold, answer) is verdict


def test_figures_are_left_as_they_are() -> None:
    """`MathVerifier` passes plain figures by the reading of both sides; that must be what the reading comes to."""
    figures = ["0", "-0", "18", "-3", "007", "3.50", "-0.25", "1234567890123", "0.0000672"]
    for gold in figures:
        for answer in figures:
            assert read_together(canonical(gold), canonical(answer)) == (gold, answer)
