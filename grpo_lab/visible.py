"""Text of models, data and files, made safe to show: nothing in it acts, hides, or turns other text around.

A terminal obeys control characters, and some characters of Unicode are invisible or reverse the order of the text
around them. ``visible`` shows what they are instead. ``encodable`` replaces what no UTF-8 file can hold.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import Any

_UNSEEN = [
    *[*range(0x80, 0xA0), 0xAD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070)],
    *[0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080)],
]
"""Code points that act without being seen: C1 controls, characters without width, changes of direction, tags."""
_PICTURES: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **{code: f"⟨U+{code:04X}⟩" for code in _UNSEEN},
}


def visible(text: str) -> str:
    """Return ``text`` with its invisible characters made visible.

    Control characters become their pictures (␀, ␛, …), except tabs and line ends. Characters that reverse the writing
    direction or have no width become their number (⟨U+202E⟩). Joiners stay, since emoji and some scripts need them.
    Lone surrogates are replaced (``encodable``).
    """
    shown: str = encodable(text.replace("\r\n", "\n")).translate(_PICTURES)
    return shown


def encodable(value: Any) -> Any:
    """Return ``value`` with U+FFFD for each lone surrogate in its texts, in nested lists and mappings, too. A lone
    surrogate is half a character, which no UTF-8 file can hold."""
    if isinstance(value, str):
        if value.isascii() or _is_whole(value):
            return value
        return _without_halves(value)
    if isinstance(value, dict):
        return {name: encodable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [encodable(item) for item in value]
    return value


def _is_whole(text: str) -> bool:
    """Return whether ``text`` has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_halves(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class VisibleFormatter(logging.Formatter):
    """A log formatter whose lines are safe to show on a terminal (``visible``)."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def print_errors_visibly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an uncaught error, made safe for a terminal; a value for ``sys.excepthook``."""
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)
