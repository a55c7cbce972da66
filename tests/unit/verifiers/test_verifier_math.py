"""Equality of isolated answers: kinds of gold, spellings, and text that is out to hurt."""

from __future__ import annotations

import logging
import time

import pytest

from grpo_lab.verifiers import Limits, MathVerifier, Verdict
from grpo_lab.verifiers.canonical import canonical
from grpo_lab.verifiers.math_equality import GoldKind, kind_of_gold


@pytest.mark.parametrize(
    ("written", "spelling"),
    [
        ("**$\\boxed{1{,}234}$.**", "1,234"),
        ("−3½ kg", "-3\\frac{1}{2} kg"),
        ("１８", "18"),
        ("١٨", "18"),
        ("$ 18 $", "18"),
        ("\\$18.50", "18.50"),
        ("-$5", "-5"),
        ("€1.000,5", "1.000,5"),
        ("18 dollars", "18"),
        ("72 degrees", "72"),
        ("3/4 cup", "3/4"),
        ("15\\mbox{ cm}^2", "15"),
        ("28 percent", "28\\%"),
        ("28\\text{ percent}", "28\\%"),
        ("12 345 678", "12345678"),
        ("32,\\! 349", "32349"),
        ("0,25", "0.25"),
        ("+1,000", "1,000"),
        ("5 1/2", "5\\frac{1}{2}"),
        ("√2", "\\sqrt{2}"),
        ("\\text{Evelyn}.", "\\text{Evelyn}"),
        ("\\text{18}", "18"),
        ("\\text{(C)}", "\\text{(C)}"),
        ("\\mathrm{C}", "\\mathrm{C}"),
        ("2\\pi\\mathrm{i}", "2\\pi i"),
        ("A^{\\mathrm{T}}", "A^{T}"),
        ("\\operatorname{lcm}(4,6)", "\\operatorname{lcm}(4,6)"),
        ("[18]", "18"),
        ("[1,2]", "[1,2]"),
        ("\\dfrac12", "\\frac12"),
        ("\\cos 2t", "\\cos(2t)"),
        ("\\sin^2t", "\\sin^{2}(t)"),
        ("5!", "5!"),
        ("\\{1, 2\\}", "\\{1, 2\\}"),
        ("", ""),
    ],
)
def test_canonical_spelling(written: str, spelling: str) -> None:
    assert canonical(written) == spelling


KINDS = {
    GoldKind.NUMBER: ["18", "-1,234.5"],
    GoldKind.MATH: ["\\frac{1}{2}", "x^2+1", "AB=4, CD=5"],
    GoldKind.TEXT: ["\\text{Evelyn}", "\\text{(C)}", "C", "Evelyn", "(D) Alina"],
    GoldKind.UNUSABLE: ["", "???", "None", "n/a", "forty-two", "forty two", "I do not know the answer"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_gold(kind: GoldKind) -> None:
    assert {gold: kind_of_gold(gold) for gold in KINDS[kind]} == dict.fromkeys(KINDS[kind], kind)


EQUAL = [
    ("\\frac{1}{2}", "0.5"),
    ("918\\frac{1}{2}", "918.5"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, π/2)"),
    ("(-\\infty,1)\\cup(1,\\infty)", "(-∞, 1) ∪ (1, ∞)"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("\\{1, 2\\}", "\\{2, 1\\}"),
    ("\\text{Evelyn}", "evelyn"),
    ("\\text{(C)}", "C"),
    ("C", "(C) 18 apples"),
    ("18", "x = 18"),
    ("12.5", "12,5"),
    ("7.8\\times 10^2", "780"),
    ("\\sin^2t", "\\sin^2 t"),
    ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}"),
    ("10%", "10"),
]
NOT_EQUAL = [
    ("\\frac{1}{2}", "0.51"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "(1,2)"),
    ("\\text{Evelyn}", "nyleve"),  # as a product of symbols these two would be equal
    ("\\text{(C)}", "D"),
    ("\\cos 2t", "\\cos 2"),
    ("18", "17, 18"),
    ("18", "5x"),
    ("5", "5x"),
    ("x^2+2x+1", "x^3+2x+1"),
    ("1000", "1"),
]


@pytest.mark.not_fast(cases="\\\\frac{1}{2}-0.5")
@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(verifier: MathVerifier, gold: str, answer: str) -> None:
    assert verifier.compare([(gold, answer)])[0].verdict is Verdict.EQUAL


@pytest.mark.parametrize(("gold", "answer"), NOT_EQUAL)
def test_not_equal(verifier: MathVerifier, gold: str, answer: str) -> None:
    assert verifier.compare([(gold, answer)])[0].verdict is Verdict.NOT_EQUAL


@pytest.mark.parametrize("gold", ["\\frac{1}", "1/0", "", "???", "\\text{}", "{", "x" * 5000, "Answer is forty two."])
def test_an_unusable_gold_accepts_nothing_not_even_itself(verifier: MathVerifier, gold: str) -> None:
    assert verifier.compare([(gold, gold)])[0].verdict is Verdict.UNPARSEABLE_GOLD
    assert verifier.compare([(gold, "18")])[0].verdict is Verdict.UNPARSEABLE_GOLD


@pytest.mark.slow
def test_hostile_answers_end_in_a_verdict() -> None:
    """None of these may hang the caller, kill it, or be right; the honest answer among them still is."""
    bombs = [
        "9**9**9**9",
        "9^{9^{9^9}}",
        "99999999!",
        "2^{2^{2^{2^{2^{2}}}}}",
        "{" * 1900,
        "\\frac{" * 300 + "1" + "}" * 300,
        "\\sqrt{" * 250 + "2" + "}" * 250,
        "\\int " * 200 + "x",
        "(x+1)^{100000}",
        "1" * 1999,
        "x" * 100_000,
        "\\boxed{" * 15_000,
        "\x00\ud800",
        "ответ сорок два",
        "$" * 50_000,
    ]
    verifier = MathVerifier(limits=Limits(cpu_seconds=0.5, wall_seconds=10.0), workers=2)
    begun = time.monotonic()
    verdicts = verifier.compare([("9", bomb) for bomb in bombs] + [("\\frac{1}{2}", "0.5")])
    assert time.monotonic() - begun < 600  # at most 10 s on the clock each, two at a time, and new workers
    assert [verdict.verdict for verdict in verdicts[:-1] if verdict.equal] == []
    assert Verdict.TIMEOUT in {verdict.verdict for verdict in verdicts}
    assert verdicts[-1].verdict is Verdict.EQUAL
    verifier.close()


@pytest.mark.not_fast
def test_plain_numbers_start_no_process_and_the_fast_path_can_be_switched_off() -> None:
    fast, slow = MathVerifier(workers=1), MathVerifier(workers=1, fast_path=False)
    pairs = [("18", "18"), ("18", "$18.00"), ("18", "19"), ("1,000", "1000")]
    expected = [Verdict.EQUAL, Verdict.EQUAL, Verdict.NOT_EQUAL, Verdict.EQUAL]
    assert [verdict.verdict for verdict in fast.compare(pairs)] == expected
    assert fast.pool.pids == []
    assert [verdict.verdict for verdict in slow.compare(pairs)] == expected
    assert len(slow.pool.pids) == 1
    slow.close()


def test_known_pairs_are_not_computed_again(verifier: MathVerifier) -> None:
    pair = ("x^2+2x+1", "(x+1)^2")
    assert verifier.compare([pair])[0].equal
    pool, verifier.pool = verifier.pool, None  # type: ignore[assignment]  # a second look would fail
    try:
        assert verifier._decide_here(*map(canonical, pair)).equal  # type: ignore[union-attr]
    finally:
        verifier.pool = pool


def test_no_logging_noise(verifier: MathVerifier, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        verifier.compare([("\\frac{2}{3}", "\\frac{")])
    assert caplog.records == []
