"""Links of the pages: where they stand, where they lead, and the anchors that a page has (as GitHub and the site write
them)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from documentation.blocks import ROOT

_FENCED = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.M | re.S)
_LINK = re.compile(r"\]\((?P<target>[^)\s]*)(?: \"[^\"]*\")?\)|<(?:a|img)[^>]*?(?:href|src)=\"(?P<html>[^\"]*)\"")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?)(?: +#+)?$", re.M)
_ELSEWHERE = re.compile(r"[a-z]+:")
#: a host with a dot, and nothing that a copied sentence would leave at the end
_EXTERNAL = re.compile(r"https?://[\w-]+(?:\.[\w-]+)+(?::\d+)?(?:/[\w./~%+,;:@&=?#!'*-]*[\w/=~%-])?")


@dataclass(frozen=True)
class Link:
    page: str
    line: int
    target: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def links(page: Path, root: Path = ROOT) -> list[Link]:
    """Every link and picture of a page, outside of code."""
    text = _without_code(page.read_text(encoding="utf-8"))
    name = str(page.relative_to(root))
    return [
        Link(name, text.count("\n", 0, seen.start()) + 1, seen["target"] or seen["html"] or "")
        for seen in _LINK.finditer(text)
    ]


def fault(link: Link, root: Path = ROOT) -> str | None:
    """What is wrong with it; None where nothing is. The network is not asked."""
    if _ELSEWHERE.match(link.target):
        return None if _EXTERNAL.fullmatch(link.target) else "is no address"
    if not link.target:
        return "leads nowhere"
    if link.target.startswith("/"):
        return "is absolute: write it from the page's own folder"
    path, _, anchor = link.target.partition("#")
    page = root / link.page
    there = (page.parent / path).resolve() if path else page
    if not there.is_relative_to(root.resolve()) or not there.exists():
        return f"leads to {there}, which is not there"
    if anchor and there.suffix == ".md" and anchor not in anchors(there):
        return f"{there.name} has no heading #{anchor}; it has {sorted(anchors(there))}"
    return None


def anchors(page: Path) -> set[str]:
    """Of its headings; the second of two equal ones ends in ``-1``."""
    found: dict[str, int] = {}
    result = set()
    for heading in _HEADING.finditer(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        slug = _slug(heading["text"])
        result.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return result


def _slug(heading: str) -> str:
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def _without_code(text: str) -> str:
    blank = _FENCED.sub(lambda seen: "\n" * seen[0].count("\n"), text)
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", lambda seen: "\n" * seen[0].count("\n"), blank, flags=re.S)


__all__ = ["Link", "anchors", "fault", "links"]
