"""Hooks of MkDocs (``hooks`` of mkdocs.yml), which change our pages on their way to the site.

Pages are written to be read in the repository: a link may lead out of ``docs/``, and a list may follow its sentence
without an empty line. The site has only ``docs/``, and its Markdown needs the empty line. So some pages from outside
are added, links to and from them are rewritten, and empty lines are inserted. No file of the repository is changed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

#: pages outside of docs/: where they stand in the repository → where they stand in the site
FROM_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "recipes/quickstart/README.md": "recipes/quickstart/README.md",
    "recipes/turns/README.md": "recipes/turns/README.md",
    "recipes/lab/misreading/README.md": "recipes/lab/misreading/README.md",
    "recipes/lab/chains/README.md": "recipes/lab/chains/README.md",
    "recipes/lab/sorting/README.md": "recipes/lab/sorting/README.md",
    "recipes/lab/court/README.md": "recipes/lab/court/README.md",
    "recipes/lab/capability/README.md": "recipes/lab/capability/README.md",
}
_LINK = re.compile(r"\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_ITEM = re.compile(r"([-*]|\d+\.) ")
_NEEDS = re.compile(r"^( *)<!--\s*needs:\s*([\w-]+)\s*-->$", re.M)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of ``docs/`` to the site."""
    root = Path(config.config_file_path).parent
    for source, place in FROM_OUTSIDE.items():
        files.append(File.generated(config, place, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the text of a page as the site needs it."""
    root = Path(config.config_file_path).parent
    place = page.file.src_uri
    source = next((home for home, there in FROM_OUTSIDE.items() if there == place), f"docs/{place}")
    linked = _LINK.sub(lambda link: rewritten(link, source, place, root), markdown)
    return with_empty_lines(_NEEDS.sub(r"\1*Needs: \2.*\n", linked))


def rewritten(link: re.Match[str], source: str, place: str, root: Path) -> str:
    """Return a link of the repository as a link of the site. A link that leads to no page of the site stays as it is,
    for MkDocs to refuse."""
    target = Path(os.path.normpath(root / Path(source).parent / link["target"]))
    if not target.exists() or not target.is_relative_to(root):
        return link[0]
    inside = target.relative_to(root).as_posix()
    if target.is_dir():
        inside += "/README.md"
    there = FROM_OUTSIDE.get(inside) or (inside.removeprefix("docs/") if inside.startswith("docs/") else None)
    if there is None:
        return link[0]
    return f"]({os.path.relpath(there, Path(place).parent.as_posix())}{link['anchor'] or ''})"


def with_empty_lines(markdown: str) -> str:
    """Insert an empty line before each list or table that follows a sentence, where GitHub needs none. Fenced code
    stays as it is."""
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        before = lines[-1] if lines else ""
        if not fenced and before.strip() and _begins(line, before):
            lines.append("")
        if _FENCE.match(line):
            fenced = not fenced
        lines.append(line)
    return "\n".join(lines)


def _begins(line: str, before: str) -> bool:
    """Return whether ``line`` begins a list or a table, after the line ``before``."""
    if line.startswith("|"):
        return not before.startswith("|")
    return bool(_ITEM.match(line)) and not _ITEM.match(before) and not before.startswith((" ", "#"))
