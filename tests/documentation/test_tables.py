"""The site's reader takes a table for text where no blank line (or heading, or comment) stands before it; a row that
follows a sentence, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from documentation.blocks import ROOT, pages


def broken_tables(text: str) -> list[int]:
    """Numbers of the lines that begin with ``|`` where a line of text stands before them, or follow one."""
    found, fenced, before = [], False, ""
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        table, was_table = line.startswith("|"), before.startswith("|")
        apart = not before.strip() or before.startswith(("#", "<!--"))
        if not fenced and (
            (table and not was_table and not apart)
            or (was_table and not table and line.strip() and not line.startswith("<!--"))
        ):
            found.append(number)
        before = line
    return found


@pytest.mark.parametrize("page", [p for p in pages() if p.suffix == ".md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_table_stands_apart(page: Path) -> None:
    assert broken_tables(page.read_text()) == []


def test_a_planted_one_is_seen() -> None:
    assert broken_tables("text\n| a |\n|---|\n| 1 |\ntext\n| 2 |") == [2, 5, 6]
    assert broken_tables("## head\n| a |\n|---|\n\ntext") == []
