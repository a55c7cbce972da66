r"""Where the `\boxed{...}` and `\fbox{...}` of a text are, and `\boxed 5`. Linear in its length."""

from __future__ import annotations

import re
from typing import NamedTuple

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[-+]?\$?[\d.,/]*\d|\\[a-zA-Z]+[^$\n]{0,80}|[a-zA-Z]\b")


class Place(NamedTuple):
    """A box: the whole command is `[start, end)`, what it holds `[inside, inside_end)`."""

    start: int
    end: int
    inside: int
    inside_end: int


def closed_boxes(text: str) -> list[Place]:
    """Outermost closed boxes, by one pass with a stack; a box that never closes is none."""
    first = _first_box(text)
    if first is None:
        return []
    closed: list[Place] = []
    stack: list[tuple[int, int] | None] = []  # (start of the command, start of the inside); None: some other brace
    pending: re.Match[str] | None = None
    for token in _BOX_TOKEN.finditer(text, first):
        mark = token[0]
        head = pending if pending is not None and pending.end() == token.start() else None
        pending = None
        if mark.startswith((r"\boxed", r"\fbox")):
            pending = token
            bare = _BARE_BOX.match(text, token.end())
            if bare:
                _close_box(closed, Place(token.start(), bare.end(), bare.start(), bare.end()))
        elif mark == "{":
            stack.append((head.start(), token.end()) if head is not None else None)
        elif mark == "}" and stack:
            opened = stack.pop()
            if opened is not None:
                _close_box(closed, Place(opened[0], token.end(), opened[1], token.start()))
    return closed


def _first_box(text: str) -> int | None:
    """Where the backslashes before the first `boxed` or `fbox` begin (`\\\\boxed` is a line break); no brace before it matters."""
    found = min((place for head in ("\\boxed", "\\fbox") if (place := text.find(head)) >= 0), default=-1)
    while found > 0 and text[found - 1] == "\\":
        found -= 1
    return found if found >= 0 else None


def _close_box(closed: list[Place], box: Place) -> None:
    while closed and closed[-1].start > box.start:
        closed.pop()  # it lies inside this one
    closed.append(box)


__all__ = ["Place", "closed_boxes"]
