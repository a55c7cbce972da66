"""What is dropped behind a number as its unit, and what is a symbol that stands upright."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_lab.verifiers import MathVerifier
from grpo_lab.verifiers.canonical import canonical

SAME = {
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
OTHER = {
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


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    shared = MathVerifier(workers=1)
    yield shared
    shared.close()


@pytest.mark.parametrize(("table", "equal"), [(SAME, True), (OTHER, False)], ids=["same", "other"])
def test_units_go_and_symbols_stay(verifier: MathVerifier, table: dict[str, list[str]], equal: bool) -> None:
    pairs = [(gold, answer) for gold, answers in table.items() for answer in answers]
    found = verifier.compare(pairs)
    assert [pair for pair, verdict in zip(pairs, found, strict=True) if verdict.equal is not equal] == []
    assert all(verdict.equal for verdict in verifier.compare([(gold, gold) for gold in table]))


@pytest.mark.parametrize(
    ("written", "spelling"),
    [
        (r"\text{(C)}", r"\text{(C)}"),
        (r"\mathrm{C}", r"\mathrm{C}"),
        (r"2\pi\mathrm{i}", r"2\pi i"),
        (r"A^{\mathrm{T}}", "A^{T}"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
        (r"\operatorname{lcm}(4,6)", r"\operatorname{lcm}(4,6)"),
    ],
)
def test_spelling_of_upright_letters(written: str, spelling: str) -> None:
    assert canonical(written) == spelling
