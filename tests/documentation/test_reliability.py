"""docs/reliability.md: every promise names a test, every named test exists; a planted fault is seen."""

from __future__ import annotations

import re

import pytest

from documentation.blocks import ROOT

PAGE = ROOT / "docs" / "reliability.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promised(text: str) -> list[str]:
    """Entries of the lists of promises."""
    part = text[text.index("## Promised") : text.index("## Shown at length")]
    return [line for line in part.splitlines() if line.startswith("- ")]


def faults(text: str) -> list[str]:
    found = [f"no test: {entry}" for entry in promised(text) if not TEST.search(entry)]
    for file, name in TEST.findall(text):
        path = ROOT / file
        if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
            found.append(f"{file} has no {name}")
    return found


def test_every_promise_has_its_test() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(promised(text)) >= 80
    assert faults(text) == []


@pytest.mark.parametrize(
    "entry",
    ["- more", "- more: `tests/unit/runs/test_atomic.py::test_gone`", "- more: `tests/gone.py::test_it`"],
)
def test_a_planted_fault_is_seen(entry: str) -> None:
    text = PAGE.read_text(encoding="utf-8").replace("## Shown at length", f"{entry}\n\n## Shown at length", 1)
    assert len(faults(text)) == 1
