"""Code in the pages: fenced blocks with their marker, and commands that stand in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".venv", "runs", "build", "node_modules", "shared"}
#: ``<!-- needs: gpu -->`` on the line before a fence: the block is compiled or parsed, and not run
NEEDS = ("gpu", "server", "hours", "network")
COMMANDS = ("grpo-lab", "accelerate", "make", "python", "python3", "sbatch", "pip", "torchrun")

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[^`\n]*)$")
_MARKER = re.compile(r"^\s*<!--\s*needs:\s*(?P<need>[\w-]+)\s*-->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is that of its first line of code, from 1."""

    page: str
    line: int
    language: str
    code: str
    needs: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages(root: Path = ROOT) -> list[Path]:
    """Every Markdown page of the repository but the changelog, which quotes what once was."""
    found = (path for path in root.rglob("*.md") if not NOT_OURS & set(path.relative_to(root).parts))
    return sorted(path for path in found if path.name != "CHANGELOG.md" and not _hidden(path.relative_to(root)))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def blocks(page: Path, root: Path = ROOT) -> list[Block]:
    """The fenced blocks of a page, in order. ValueError for a fence that is not closed, and for an unknown marker."""
    found: list[Block] = []
    name, lines = str(page.relative_to(root)), page.read_text(encoding="utf-8").splitlines()
    opened: tuple[int, re.Match[str]] | None = None
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened = number, fence
        elif opened is not None and fence and _closes(fence, opened[1]):
            start, begin = opened
            code = [row.removeprefix(begin["indent"]) for row in lines[start : number - 1]]
            needs = _marker(lines[start - 2] if start > 1 else "", f"{name}:{start - 1}")
            found.append(Block(name, start + 1, begin["language"].strip(), "\n".join(code) + "\n", needs))
            opened = None
    if opened is not None:
        raise ValueError(f"{name}:{opened[0]}: a fence without an end")
    return found


def _closes(fence: re.Match[str], begin: re.Match[str]) -> bool:
    return fence["ticks"].startswith(begin["ticks"]) and not fence["language"].strip()


def _marker(line: str, where: str) -> str | None:
    seen = _MARKER.match(line)
    if seen is None:
        return None
    if seen["need"] not in NEEDS:
        raise ValueError(f"{where}: marker `needs: {seen['need']}`; it must be one of {NEEDS}")
    return seen["need"]


def loose_commands(page: Path, root: Path = ROOT) -> list[Block]:
    """Commands outside of fences: ``code`` in the text with an argument, and indented lines."""
    name, text = str(page.relative_to(root)), page.read_text(encoding="utf-8")
    fenced = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", lambda seen: "\n" * seen[0].count("\n"), text, flags=re.M | re.S)
    starts = "|".join(re.escape(word) for word in COMMANDS)
    inline = re.compile(rf"`(?P<code>(?:{starts}) [^`]+)`|^ {{4,}}(?P<line>(?:{starts}) .+)$", re.M)
    return [
        Block(name, fenced.count("\n", 0, seen.start()) + 1, "bash", _whole(seen["code"] or seen["line"]), None)
        for seen in inline.finditer(fenced)
    ]


def _whole(command: str) -> str:
    """On one line; a bare ``grpo-lab serve`` names a command, which then has a help page."""
    line = " ".join(command.split())
    return f"{line} --help\n" if re.fullmatch(r"grpo-lab [\w-]+", line) else f"{line}\n"


__all__ = ["COMMANDS", "NEEDS", "ROOT", "Block", "blocks", "loose_commands", "pages"]
