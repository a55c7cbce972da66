"""The program in a completion: its last fenced block, else all of it."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^([ \t]{0,8})(`{3,}|~{3,})[ \t]*([^\s`]{0,30})[^`\n]*$")
_PYTHON = ("python", "py", "python3")
_END_OF_THOUGHT = "</think>"


def program_text(completion: str) -> str:
    """The last block fenced as Python; else the last fenced without a language; else the last fenced; else the whole text.

    What stands before the last ``</think>`` is not looked at. A last fence that is never closed reaches to the end.
    """
    text = completion.rpartition(_END_OF_THOUGHT)[2]
    blocks = fenced_blocks(text)
    for wanted in (_PYTHON, ("",), tuple({language for language, _ in blocks})):
        chosen = [block for language, block in blocks if language in wanted]
        if chosen:
            return chosen[-1]
    return text


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case, inside) of every fenced block, in order. A block indented with its fence (in a list) is moved left."""
    blocks: list[tuple[str, str]] = []
    opened: tuple[str, str, int] | None = None
    inside: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, inside = (fence[2], fence[3].lower(), len(fence[1])), []
        elif fence and not fence[3] and fence[2].startswith(opened[0]):
            blocks.append((opened[1], "\n".join(inside)))
            opened = None
        else:
            inside.append(line[: opened[2]].lstrip(" \t") + line[opened[2] :])
    if opened is not None:
        blocks.append((opened[1], "\n".join(inside)))
    return blocks


__all__ = ["fenced_blocks", "program_text"]
