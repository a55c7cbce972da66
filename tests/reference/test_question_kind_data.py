"""Question kinds on 503 real questions of some twenty sources that somebody else labelled, and on GSM8K, MATH-500 and
AIME.

The rules were written while looking at one half of the rows (by a hash of the id); the other half was then scored once
unseen: 249 of 257 right (96.9%), traps 14 of 15. After that its eight misses were looked at too and the rules mended by
kind of question, so today's number on it is no longer a blind one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.curation import question_kind


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def labelled(grpo_lab_data: Path) -> list[tuple[dict[str, Any], bool]]:
    rows = read(grpo_lab_data / "multiple_choice" / "questions.jsonl")
    return [(row, question_kind(row["text"]) == row["kind"]) for row in rows]


def share(results: list[bool]) -> float:
    return sum(results) / len(results)


def test_overall_and_on_both_halves(labelled: list[tuple[dict[str, Any], bool]]) -> None:
    half = [hashlib.sha1(row["id"].encode()).digest()[0] % 2 for row, _ in labelled]
    assert share([right for _, right in labelled]) >= 0.95  # 99.2%
    assert share([right for (_, right), h in zip(labelled, half) if h == 0]) >= 0.95  # 99.6%, looked at
    assert share([right for (_, right), h in zip(labelled, half) if h == 1]) >= 0.95  # 98.8%, 96.9% when unseen


@pytest.mark.parametrize("kind", ["open", "multiple_choice", "true_false", "proof"])
def test_every_kind(labelled: list[tuple[dict[str, Any], bool]], kind: str) -> None:
    assert share([right for row, right in labelled if row["kind"] == kind]) >= 0.93


def test_traps(labelled: list[tuple[dict[str, Any], bool]]) -> None:
    traps = [right for row, right in labelled if "trap" in row]
    assert len(traps) == 25
    assert share(traps) >= 0.7  # 25 of 25


@pytest.mark.not_fast(but="math/math500-problem")
@pytest.mark.parametrize(
    ("file", "column"),
    [("gsm8k/train", "question"), ("gsm8k/test", "question"), ("math/math500", "problem"), ("math/aime24", "problem")],
)
def test_open_sets_are_kept(grpo_lab_data: Path, file: str, column: str) -> None:
    kinds = Counter(question_kind(row[column]) for row in read(grpo_lab_data / f"{file}.jsonl"))
    assert kinds["open"] / kinds.total() >= 0.97  # all; MATH-500 99.4%: its three misses are lettered choices
