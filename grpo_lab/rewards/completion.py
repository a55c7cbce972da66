"""The parts of a completion: its text, whichever of TRL's two shapes it comes in, its reasoning, its program, its
answer.

``RowReward`` is what rewards of one completion and its row's columns share.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

_PARSED = ("reasoning_content", "thinking")  # where TRL's response parsing puts what stood between the tags
THINK, END_OF_THINK = "<think>", "</think>"
_FENCE = re.compile(r"^([ \t]{0,8})(`{3,}|~{3,})[ \t]*([^\s`]{0,30})")
_PYTHON = re.compile(r"\{?\.?(?:i?python|py)[\d.]*\}?")
_QUOTES = re.compile(r"\"\"\"|'''")
_LOOK_AHEAD = 400
"""Lines in which a text in triple quotes must end for a fence in it to be part of it."""


class RowReward(ABC):
    """A reward of one completion and the row's own columns: implement ``score``."""

    columns: ClassVar[tuple[str, ...]] = ()
    """What ``score`` gets beside the text; ``LabTrainer`` looks for them in the data set before anything is loaded."""

    @abstractmethod
    def score(self, text: str, *row: Any) -> float | None:
        """The reward of one completion; ``None`` where the row's columns hold nothing to judge it by."""

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """Rewards in order. ``ValueError`` where completions or columns are missing, or are not one to one."""
        given = [columns.get(name) for name in self.columns]
        if completions is None or any(values is None for values in given):
            needed = ["completions=[...]", *(f"the column {name!r}" for name in self.columns)]
            raise ValueError(f"{type(self).__name__} needs {' and '.join(needed)}")
        lists = [completions, *(values for values in given if values is not None)]
        if len({len(values) for values in lists}) > 1:
            counts = dict(zip(("completions", *self.columns), map(len, lists), strict=True))
            raise ValueError(f"{type(self).__name__} got {counts}; they must be one to one")
        return [self.score(completion_text(text), *row) for text, *row in zip(*lists, strict=True)]


def completion_text(completion: Any) -> str:
    """A plain string as it is; of a message list the last assistant message (its text parts, when it has parts)."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, dict) for message in completion):
        said = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return _content_text(said[-1].get("content")) if said else ""
    raise ValueError(
        f"a completion must be a string or a list of message dicts; got {type(completion).__name__}: "
        f"{completion!r:.200}"
    )


def prompt_text(prompt: Any) -> str:
    """A plain string as it is; of a message list all that is said in it."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_content_text(message.get("content")) for message in prompt or ())


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, dict | str) for part in content):
        return "".join(_part_text(part) for part in content)
    raise ValueError(
        f"a message's content must be a string, None or a list of parts; got {type(content).__name__}: {content!r:.200}"
    )


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if part.get("type", "text") == "text" else None
    return text if isinstance(text, str) else ""


def reasoning_of(text: str) -> str:
    """All ``<think>…</think>`` contents of ``text``, in order; the whole text where there is no tag.

    Half a block is a block: without its opening tag (many chat templates write that into the prompt) it begins with the
    text, without its closing tag (stopped by the token budget) it ends with it. An empty block is empty reasoning, so
    that reasoning outside the tags is not mistaken for it.
    """
    first_open, first_close = text.find(THINK), text.find(END_OF_THINK)
    if first_open < 0 and first_close < 0:
        return text
    if first_close >= 0 and not 0 <= first_open < first_close:
        text = THINK + text
    blocks = [after.split(END_OF_THINK, 1)[0] for after in text.split(THINK)[1:]]
    return "\n".join(blocks)


def reasoning_in(completion: Any) -> str:
    """The reasoning of a completion in either of TRL's shapes: a string, or messages, parsed or not."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], Mapping):
        for key in _PARSED:
            if isinstance(completion[-1].get(key), str):
                return str(completion[-1][key])
    return reasoning_of(completion_text(completion))


def program_text(completion: str) -> str:
    """The last block fenced as Python; else the last fenced without a language; else the last fenced; else the last
    ``<answer>``; else all.

    Text before the last ``</think>`` is not looked at. A last fence that is never closed reaches to the end, or to a
    line that ends with the closing fence. A byte order mark is no part of a program.
    """
    text = completion.rpartition(END_OF_THINK)[2]
    blocks = fenced_blocks(text)
    for wanted in (_PYTHON.fullmatch, "".__eq__, lambda language: True):
        chosen = [block for language, block in blocks if wanted(language)]
        if chosen:
            return chosen[-1].lstrip("\ufeff")
    _, opened, answer = text.rpartition("<answer>")
    inside, closed, _ = answer.partition("</answer>")
    return (inside if opened and closed else text).lstrip("\ufeff")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case, inside) of every fenced block, in order. A block indented with its fence (in a list) is
    moved left.

    In a block of Python, a fence inside a text in triple quotes is part of that text; a fence with a language outside
    of one begins a new block, whose forerunner was not closed.
    """
    return _Blocks(text.split("\n")).read()


def _fence(line: str) -> re.Match[str] | None:
    """No backtick may follow a fence in its line: looked for here, since in the pattern it would cost the square of a
    line of spaces."""
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
        """Whether the line ``at`` is inside triple quotes that end before the next block that names its language
        does."""
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


def answer_block(completion: str) -> str:
    """The inside of the last ``<answer>``, else the last fenced block, else all.

    Text before the last ``</think>`` is not looked at; an ``<answer>`` that is never closed reaches to the end.
    """
    text = completion.rpartition(END_OF_THINK)[2]
    _, marked, answer = text.rpartition("<answer>")
    if marked:
        return answer.partition("</answer>")[0]
    blocks = fenced_blocks(text)
    return blocks[-1][1] if blocks else text
