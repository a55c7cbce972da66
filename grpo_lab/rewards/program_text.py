"""The program in a completion: its last fenced block, else what is in its last ``<answer>``, else all of it.

The part of a completion that answers: inside its last ``<answer>``, else its last fenced block, else all of it.
"""

from __future__ import annotations

import re

_FENCE = re.compile(r"^([ \t]{0,8})(`{3,}|~{3,})[ \t]*([^\s`]{0,30})")
_PYTHON = re.compile(r"\{?\.?(?:i?python|py)[\d.]*\}?")
_END_OF_THOUGHT = "</think>"
_QUOTES = re.compile(r"\"\"\"|'''")
_LOOK_AHEAD = 400
"""Lines in which a text in triple quotes must end for a fence in it to be part of it."""


def program_text(completion: str) -> str:
    """The last block fenced as Python; else the last fenced without a language; else the last fenced; else the last ``<answer>``; else all.

    What stands before the last ``</think>`` is not looked at. A last fence that is never closed reaches to the end, or to a line that
    ends with the closing fence. A byte order mark is no part of a program.
    """
    text = completion.rpartition(_END_OF_THOUGHT)[2]
    blocks = fenced_blocks(text)
    for wanted in (_PYTHON.fullmatch, "".__eq__, lambda language: True):
        chosen = [block for language, block in blocks if wanted(language)]
        if chosen:
            return chosen[-1].lstrip("\ufeff")
    _, opened, answer = text.rpartition("<answer>")
    inside, closed, _ = answer.partition("</answer>")
    return (inside if opened and closed else text).lstrip("\ufeff")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case, inside) of every fenced block, in order. A block indented with its fence (in a list) is moved left.

    In a block of Python, a fence inside a text in triple quotes is part of that text; a fence with a language outside of one begins
    a new block, whose forerunner was not closed.
    """
    return _Blocks(text.split("\n")).read()


def _fence(line: str) -> re.Match[str] | None:
    """No backtick may follow a fence in its line: looked for here, since in the pattern it would cost the square of a line of spaces."""
    found = _FENCE.match(line)
    return None if found is None or "`" in line[found.end() :] else found


class _Blocks:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.fences = [_fence(line) for line in lines]
        self.found: list[tuple[str, str]] = []
        self.opened: re.Match[str] | None = None
        self.inside: list[str] = []
        self.quote = ""
        self.text_until = -1

    def read(self) -> list[tuple[str, str]]:
        for at, line in enumerate(self.lines):
            fence = self.fences[at]
            if self.opened is None:
                if fence:
                    self._open(fence)
            elif fence and self._closes(fence) and not self._in_a_text(at):
                self._close()
            elif fence and fence[3] and not self.quote and self._python():
                self._close()
                self._open(fence)
            else:
                self._take(line)
        if self.opened is not None:
            self._close_unclosed()
        return self.found

    def _open(self, fence: re.Match[str]) -> None:
        self.opened, self.inside, self.quote = fence, [], ""

    def _closes(self, fence: re.Match[str]) -> bool:
        return self.opened is not None and not fence[3] and fence[2].startswith(self.opened[2])

    def _python(self) -> bool:
        return self.opened is not None and (not self.opened[3] or bool(_PYTHON.fullmatch(self.opened[3].lower())))

    def _take(self, line: str) -> None:
        width = len(self.opened[1]) if self.opened is not None else 0
        self.inside.append(line[:width].lstrip(" \t") + line[width:])
        for quote in _QUOTES.findall(line):
            self.quote = "" if quote == self.quote else self.quote or quote

    def _close(self) -> None:
        assert self.opened is not None
        self.found.append((self.opened[3].lower(), "\n".join(self.inside)))
        self.opened = None

    def _close_unclosed(self) -> None:
        """Closed at the end of a line of its own, or not at all."""
        assert self.opened is not None
        mark = self.opened[2]
        for at, line in enumerate(self.inside):
            bare = line.rstrip()
            if bare.endswith(mark) and bare.count(mark) == 1:
                self.inside = [*self.inside[:at], bare[: -len(mark)]]
                break
        self._close()

    def _in_a_text(self, at: int) -> bool:
        """Whether the line ``at`` is inside triple quotes that end before the next block that names its language does."""
        if not self.quote or not self._python():
            return False
        if at < self.text_until:
            return True
        apart = False  # inside another block
        for there in range(at + 1, min(len(self.lines), at + _LOOK_AHEAD)):
            fence = self.fences[there]
            if fence:
                apart = bool(fence[3])
            elif not apart and self.quote in self.lines[there]:
                self.text_until = there
                return True
        return False


_OPEN, _CLOSE = "<answer>", "</answer>"


def answer_block(completion: str) -> str:
    """What stands before the last ``</think>`` is not looked at; an ``<answer>`` that is never closed reaches to the end."""
    text = completion.rpartition("</think>")[2]
    _, marked, answer = text.rpartition(_OPEN)
    if marked:
        return answer.partition(_CLOSE)[0]
    blocks = fenced_blocks(text)
    return blocks[-1][1] if blocks else text
