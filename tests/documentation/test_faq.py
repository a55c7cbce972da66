"""docs/faq.md names a test for each answer: the test is there."""

from __future__ import annotations

import re

import pytest

from documentation.blocks import ROOT

PAGES = ("docs/faq.md", "docs/reproduce.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / page).read_text(encoding="utf-8"))
    assert named
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_every_question_has_its_threads_and_its_test() -> None:
    questions = re.split(r"^### ", (ROOT / "docs/faq.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    assert len(questions) >= 15
    for question in questions:
        assert re.search(r"^\*.+\*", question, re.M), question
        assert re.search(r"Tests?:\s+`tests/", question), question
