"""The pages that a newcomer reads first are short, and name what there is: README, overview, design, and the list of
all pages."""

from __future__ import annotations

import re

import pytest

from documentation.blocks import ROOT, pages
from documentation.links import links
from grpo_lab.commands import COMMANDS
from test_trainer_room import names_of_no_file

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "most"), [("README.md", 800), ("docs/overview.md", 600), ("docs/design.md", 3000)])
def test_it_is_short(page: str, most: int) -> None:
    words = len((ROOT / page).read_text(encoding="utf-8").split())
    assert words <= most, f"{page} has {words} words"


def test_the_readme_has_a_row_for_each_command_and_its_files_are_there() -> None:
    table = README.partition("## Commands")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.M)
    assert [name for name, _ in rows] == list(dict.fromkeys(name for name, _ in rows))
    assert {name for name, _ in rows} == set(COMMANDS)
    files = [file for _, said in rows for file in re.findall(r"`([^`]+\.yaml)`", said)]
    assert files
    assert [file for file in files if not (ROOT / "recipes" / file).is_file()] == []


def test_the_overview_names_rooms_that_are_there() -> None:
    text = (ROOT / "docs" / "overview.md").read_text(encoding="utf-8")
    part = ("| part | page | room |", "## Read code", "grpo_lab")
    assert names_of_no_file(text, part) == []
    assert names_of_no_file(text.replace(part[1], f"`gone/` {part[1]}"), part) == ["gone/"]
    assert [name for name in re.findall(r"^\d\. `(.+?)`", text, re.M) if not (ROOT / name).is_file()] == []


def test_every_page_stands_in_the_list_of_all_pages() -> None:
    list_of_all = ROOT / "docs" / "pages.md"
    told = {(list_of_all.parent / link.target.partition("#")[0]).resolve() for link in links(list_of_all)}
    top = [page for page in pages() if page.parent == ROOT / "docs" and page != list_of_all]
    assert [page.name for page in top if page not in told] == []
