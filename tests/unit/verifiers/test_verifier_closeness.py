"""A tiny gold is equal to what has its value, and to nothing else that is tiny."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_lab.verifiers import MathVerifier

SAME = {
    r"10^{-9}": [r"\frac{1}{10^9}", "0.000000001", r"0.1\cdot 10^{-8}"],
    r"\frac{1}{2^{99}}": ["2^{-99}", r"\frac{2}{2^{100}}"],
    r"1.6\times10^{-19}": [r"16\times10^{-20}", r"\frac{1.6}{10^{19}}", r"1.60000001\times10^{-19}"],
    r"6.72\times10^{-5}": ["0.0000672"],
    r"(10^{-9}, 2)": [r"(\frac{1}{10^9}, 2)"],
    r"10^{-20}x+1": [r"1+\frac{x}{10^{20}}"],
    r"e^{-50}": [r"\frac{1}{e^{50}}"],
    r"\frac{1}{30!}": [r"\frac{31}{31!}"],
    r"\sqrt{5+2\sqrt{6}}": [r"\sqrt{2}+\sqrt{3}"],
    r"\sqrt{2}x": ["1.4142135623730950488x"],
    r"10^{-9}+10^{-9}i": [r"10^{-9}(1+i)"],
}
OTHER = {
    r"10^{-9}": ["0.0", "-0.0000001", "0.0000000011", "0", r"2\cdot10^{-9}", "10^{-10}", "-10^{-9}"],
    r"\frac{1}{2^{99}}": ["2^{-98}", "2^{-100}", "-2^{-99}", "0.0"],
    r"1.6\times10^{-19}": [r"\frac{3.2}{10^{19}}", r"1.602\times10^{-19}", r"1.6\times10^{-18}", r"\frac{1}{10^{19}}"],
    r"6.72\times10^{-5}": ["0.0000673", "0.000067"],
    r"(0.0000672, 5)": ["(0.0000673, 5)"],
    r"(1.6\times10^{-19}, 2)": [r"(3.2\times10^{-19}, 2)"],
    r"\{2^{-99}\}": [r"\{2^{-98}\}"],
    r"x=2^{-99}": ["x=2^{-98}"],
    r"[2^{-99}, 1]": ["[2^{-98}, 1]"],
    r"\begin{pmatrix}2^{-99}\\1\end{pmatrix}": [r"\begin{pmatrix}2^{-98}\\1\end{pmatrix}"],
    r"10^{-20}x+1": ["1", r"2\cdot10^{-20}x+1"],
    r"x^2+10^{-20}": ["x^2", r"x^2+2\cdot10^{-20}"],
    r"1.6\times10^{-19}x+1": [r"3.2\times10^{-19}x+1"],
    r"e^{-50}": ["e^{-51}", "-e^{-50}"],
    r"\frac{1}{30!}": [r"\frac{1}{29!}", r"\frac{1}{31!}"],
    r"10^{-20}+10^{-20}i": ["10^{-20}", r"10^{-20}-10^{-20}i"],
    "0": ["10^{-20}", "0.0000001", r"1.6\times10^{-19}"],
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    shared = MathVerifier(workers=1)
    yield shared
    shared.close()


@pytest.mark.parametrize(("table", "equal"), [(SAME, True), (OTHER, False)], ids=["same", "other"])
def test_a_tiny_value_is_told_from_every_other_one(
    verifier: MathVerifier, table: dict[str, list[str]], equal: bool
) -> None:
    pairs = [(gold, answer) for gold, answers in table.items() for answer in answers]
    found = verifier.compare(pairs)
    assert [pair for pair, verdict in zip(pairs, found, strict=True) if verdict.equal is not equal] == []
    golds = [(gold, gold) for gold in table]
    assert all(verdict.equal for verdict in verifier.compare(golds))
