"""Every link of README, docs and recipes leads somewhere: files and headings are looked up, addresses are read and not
called."""

from __future__ import annotations

from pathlib import Path

import pytest

from documentation.blocks import ROOT, pages
from documentation.links import Link, anchors, fault, links

PAGES = [*pages(), ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = [f"{link.where}: ({link.target}) {why}" for link in links(page) if (why := fault(link)) is not None]
    assert not wrong, "\n".join(wrong)


def test_links_are_found() -> None:
    assert sum(len(links(page)) for page in PAGES) > 100
    assert any("#" in link.target for page in PAGES for link in links(page))


def test_wrong_ones_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One [two](x) `three`, four!\n\n```bash\n# no heading\n```\n# Five\n# Five\n")
    (tmp_path / "a.md").write_text("`[code](no)` [a](b.md) [b](b.md#five-1) ![c](no.png)\n[d](b.md#six) [e](#here)\n")
    assert anchors(tmp_path / "b.md") == {"one-two-three-four", "five", "five-1"}
    found = links(tmp_path / "a.md", tmp_path)
    assert [(link.line, link.target) for link in found if fault(link, tmp_path) is not None] == [
        (1, "no.png"),
        (2, "b.md#six"),
        (2, "#here"),
    ]


@pytest.mark.parametrize(
    ("target", "right"),
    [
        ("https://arxiv.org/abs/2503.20783", True),
        ("http://127.0.0.1:8000", True),
        ("https://github.com/huggingface/trl#readme", True),
        ("https://localhost", False),
        ("https://arxiv.org/abs/2503.20783,", False),
        ("http//arxiv.org", False),
        ("mailto:somebody", False),
        ("/docs/design.md", False),
        ("", False),
    ],
)
def test_addresses(target: str, right: bool) -> None:
    assert (fault(Link("README.md", 1, target)) is None) == right
