"""Domains: a question of each by hand, how often the rules are right on MATH's subjects, and hostile text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from grpo_lab.curation import question_domain
from grpo_lab.curation.domains import DOMAINS

OF = {
    "counting_and_probability": "In how many ways can 5 people be seated in a row?",
    "number_theory": "What is the remainder when $7^{100}$ is divided by $11$? (Work modulo 11.)",
    "precalculus": r"Compute $\sin 75^\circ \cos 15^\circ$, and the determinant of the matrix.",
    "geometry": "The circumference of a circle inscribed in a triangle is $6\\pi$. What is its area?",
    "intermediate_algebra": "Find the sum of the real roots of the polynomial $x^4 - 5x^3 + 2$.",
    "algebra": "What is the slope of the line $2x + 3y = 6$?",
    "prealgebra": "Ann has 3 apples and buys 5 more. How many apples does she have?",
}


def test_a_question_of_every_domain() -> None:
    assert {domain: question_domain(text) for domain, text in OF.items()} == {domain: domain for domain in OF}
    assert set(OF) == set(DOMAINS)
    assert question_domain("Let $u$ be.") == "algebra", "no rule is met: an unknown"
    assert question_domain("12 * 3") == question_domain("") == "prealgebra"
    assert question_domain("[asy] probability [/asy] 2 + 2") == "geometry", "a drawing is looked at, not read"
    with pytest.raises(ValueError, match="one question as a str; got list"):
        question_domain(["x"])  # type: ignore[arg-type]


@pytest.mark.not_fast
def test_how_often_it_is_right_on_maths_subjects(grpo_lab_data: Path) -> None:
    """As docs/choosing_the_data.md has it."""
    rows = [json.loads(line) for line in (grpo_lab_data / "math" / "math500.jsonl").read_text().splitlines()]
    subjects = [row["subject"].lower().replace(" & ", "_and_").replace(" ", "_") for row in rows]
    said = [question_domain(row["problem"]) for row in rows]
    assert sum(one == subject for one, subject in zip(said, subjects, strict=True)) == 352
    school = {"algebra", "intermediate_algebra", "prealgebra"}
    joined = [
        ({"algebra"} if one in school else {one}, {"algebra"} if subject in school else {subject})
        for one, subject in zip(said, subjects, strict=True)
    ]
    assert sum(one == subject for one, subject in joined) == 427
    gsm8k = [json.loads(line)["question"] for line in (grpo_lab_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    assert sum(question_domain(text) == "prealgebra" for text in gsm8k[:200]) >= 190


@pytest.mark.parametrize("piece", ["$", "how many ", "e^{", "consecutive ", "1_{", "[asy]", "\\frac{x"])
def test_hostile_text_takes_no_long(piece: str) -> None:
    began = time.process_time()
    assert question_domain(piece * (200_000 // len(piece))) in DOMAINS
    assert time.process_time() - began < 2
