"""Tests that pages name are there; docs/reliability.md names one for each promise, docs/faq.md one for each answer; a
planted fault is seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documentation.blocks import ROOT, pages

RELIABILITY = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def promised(text: str) -> list[str]:
    """Entries of the lists of promises."""
    part = text[text.index("## Promised") : text.index("## Shown at length")]
    return [line for line in part.splitlines() if line.startswith("- ")]


def faults(text: str) -> list[str]:
    """Tests that ``text`` names and that are not there."""
    found = []
    for file, name in TEST.findall(text):
        path = ROOT / file
        if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            found.append(f"{file} has no {name}")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []


def without_test(text: str) -> list[str]:
    return [entry for entry in promised(text) if "::" not in entry or not TEST.search(entry)]


def test_every_promise_names_its_test() -> None:
    assert len(promised(RELIABILITY)) >= 80
    assert without_test(RELIABILITY) == []


def test_planted_faults_are_seen() -> None:
    assert len(without_test(RELIABILITY.replace("## Shown at length", "- more\n\n## Shown at length", 1))) == 1
    gone = ["`tests/unit/runs/test_atomic.py::test_gone`", "`tests/gone.py::test_it`", "`tests/gone.py`"]
    assert [len(faults(entry)) for entry in gone] == [1, 1, 1]


def test_every_question_has_its_threads_and_its_test() -> None:
    questions = re.split(r"^### ", (ROOT / "docs/faq.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    assert len(questions) >= 15
    for question in questions:
        assert re.search(r"^\*.+\*", question, re.M), question
        assert re.search(r"Tests?:\s+`tests/", question), question
