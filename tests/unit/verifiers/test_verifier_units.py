"""Tables of golds with answers that are equal to them and answers that are not: what is dropped behind a number as its
unit, what is a symbol that stands upright, and tiny values, which are equal to nothing else that is tiny."""

from __future__ import annotations

import pytest

from grpo_lab.verifiers import MathVerifier

SAME_UNITS = {
    r"3+4\mathrm{i}": ["3+4i", r"3+4\text{i}", r"3+4\,\mathrm{i}", r"4\mathrm i+3", "3+4 i", r"3+4{\rm i}"],
    "3+4i": [r"3+4\mathrm{i}"],
    r"2\mathrm{i}": ["2i", r"2\operatorname{i}"],
    r"2\pi\mathrm{i}": [r"2\pi i"],
    r"\mathrm{e}^2": ["e^2", r"\exp(2)", r"\mathrm{e}^{2}", "7.389056099"],
    r"\frac{\mathrm{e}}{2}": [r"\frac{e}{2}"],
    r"x\mathrm{e}^x": ["xe^x"],
    r"2\mathrm{\pi}": [r"2\pi", r"2\boldsymbol{\pi}"],
    r"3\mathrm{x}": ["3x", r"3\mathit{x}"],
    r"\mathrm{ln}2": [r"\ln 2", r"\text{ln}(2)"],
    r"\mathrm{sin}(x)": [r"\sin x", r"\operatorname{sin}(x)"],
    r"x+3\mathrm{m}": ["x+3m"],
    r"5\mathrm{m}": ["5", "5 m", r"5\,\mathrm{m}", "5m"],
    r"5\,\mathrm{m}/\mathrm{s}": ["5", "5 m/s"],
    r"6\,\mathrm{kg}\cdot\mathrm{m}/\mathrm{s}^2": ["6"],
    r"\frac{1}{2}\mathrm{m}": [r"\frac12", "0.5"],
    r"10\sqrt{3}\text{ cm}^2": [r"10\sqrt{3}", r"10\sqrt{3} cm", r"10\sqrt{3}\,\mathrm{cm}^2"],
    r"\pi\mathrm{cm}": [r"\pi", r"\pi cm"],
    r"10\sqrt{3}": [r"10\sqrt{3} m", r"10\sqrt{3} square units", r"10\sqrt{3}\,\mathrm{m}"],
    r"12\text{ ways}": ["12"],
}
OTHER_UNITS = {
    r"3+4\mathrm{i}": ["7", "3", r"3-4\mathrm{i}", "4+3i", "3+4"],
    r"2\mathrm{i}": ["2", "-2i", r"-2\mathrm{i}"],
    r"2\pi\mathrm{i}": [r"2\pi"],
    r"\mathrm{e}^2": ["2", "1", "e^3"],
    r"\mathrm{i}": ["-i", "1"],
    r"1+\mathrm{i}": ["1", "2"],
    r"\frac{\mathrm{e}}{2}": [r"\frac{1}{2}"],
    r"x\mathrm{e}^x": ["x", "x^2"],
    r"2\mathrm{\pi}": ["2"],
    r"3\mathrm{x}": ["3", "3y"],
    r"\mathrm{ln}2": ["2"],
    r"\mathrm{sin}(x)": ["x"],
    r"x+3\mathrm{m}": ["x+3"],
    r"2\mathrm{ab}": ["2", "2a"],
    r"2\mathrm{t}": ["2"],
    "2t": ["2"],
    "3d": ["3"],
    "2ab": ["2"],
    r"\frac{x}{2} c": [r"\frac{x}{2}"],
    r"2\pi l": [r"2\pi"],
    r"\sqrt{3} s": [r"\sqrt{3}"],
    r"5\text{ m} + 3t": ["5"],
    "5": ["5x", r"5\mathrm{i}", r"5\mathrm{x}", "5t"],
}
SAME_TINY = {
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
OTHER_TINY = {
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


@pytest.mark.parametrize(
    ("table", "equal"),
    [(SAME_UNITS, True), (OTHER_UNITS, False), (SAME_TINY, True), (OTHER_TINY, False)],
    ids=["same units", "other units", "same tiny", "other tiny"],
)
def test_units_go_symbols_stay_and_a_tiny_value_is_told_from_every_other_one(
    verifier: MathVerifier, table: dict[str, list[str]], equal: bool
) -> None:
    pairs = [(gold, answer) for gold, answers in table.items() for answer in answers]
    found = verifier.compare(pairs)
    assert [pair for pair, verdict in zip(pairs, found, strict=True) if verdict.equal is not equal] == []
    assert all(verdict.equal for verdict in verifier.compare([(gold, gold) for gold in table]))
