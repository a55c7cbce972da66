"""Reading text, JSON and JSON lines. A damaged file raises a ValueError: the file, the line, what was read, what is
allowed.

Damaged means: bytes that are no UTF-8, an empty file, half a file, a key that stands twice in one object (JSON leaves
open which of the two counts), nesting beyond ``DEEPEST``, and fields that are missing or of another type. A byte order
mark at the beginning is skipped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

DEEPEST = 100
"""Deepest nesting of lists and mappings that is read, in JSON and in YAML."""

Fields = Mapping[str, type | UnionType]
"""Fields that an object must have, with their types. Further fields are allowed."""

Numbers = tuple[Callable[[str], Any], Callable[[str], Any]]
"""Two functions that convert the text of a JSON number: the first for whole numbers, the second for all others."""

_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
HALF = re.compile("[\ud800-\udfff]")
"""A lone surrogate: a character that was cut between its two code units."""
_IN_WORDS = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}
_SHOWN = 60
"""Most characters of a damaged place that a message quotes."""


class _Damaged(ValueError):
    """Error that says why text cannot be read and, if known, in which of its lines."""

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(why)
        self.line = line


class _KeyTwice(ValueError):
    """Error that names a key which one object has twice."""


def read_text(path: str | os.PathLike[str], advice: str = "") -> str:
    """Return the text of a file.

    Raises:
        ValueError: the file is no UTF-8. The message ends with ``advice``.
        OSError: the file cannot be opened.
    """
    try:
        return _decoded(Path(path).read_bytes())
    except _Damaged as error:
        raise ValueError(_sentence(path, error, advice)) from None


def read_json(path: str | os.PathLike[str], advice: str = "") -> Any:
    """Return the value in a JSON file.

    Raises:
        ValueError: the file is damaged. The message ends with ``advice``.
        OSError: the file cannot be opened.
    """
    try:
        return _value_of(_decoded(Path(path).read_bytes()))
    except _Damaged as error:
        raise ValueError(_sentence(path, error, advice)) from None


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value in JSON ``text``. Raises ValueError if it is damaged; the message begins with ``where``."""
    try:
        return _value_of(text if isinstance(text, str) else _decoded(text))
    except _Damaged as error:
        raise ValueError(f"{where}: {error}") from None


def read_record(path: str | os.PathLike[str], needs: Fields | None = None, advice: str = "") -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: the file is damaged, holds no object, or lacks a field of ``needs``. The message ends with
            ``advice``.
        OSError: the file cannot be opened.
    """
    found = read_json(path, advice)
    try:
        return checked_object(found, needs or {})
    except ValueError as error:
        raise ValueError(_sentence(path, error, advice)) from None


def json_lines(
    path: str | os.PathLike[str], *, halves: bool = True, numbers: Numbers | None = None
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Read a file of JSON lines. Yield each line's number (from 1) and its object or, for a damaged line, the reason as
    text. Blank lines are skipped.

    Args:
        halves: whether a lone surrogate is let through: half a character, which can be neither tokenized nor written.
            False: such a line counts as damaged.
        numbers: functions that convert numbers; ``None``: to ``int`` and ``float``.
    """
    decoder = _DECODER if numbers is None else _decoder(*numbers)
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = _decoded(line, mark=number == 1).rstrip("\r\n")
                if not text.strip():
                    continue
                found = checked_object(_value_of(text, decoder), {})
                if not halves and _ESCAPED_HALF.search(text):
                    _refuse_halves(found)
                yield number, found
            except ValueError as error:
                yield number, str(error)


def read_json_lines(
    path: str | os.PathLike[str],
    needs: Fields | None = None,
    advice: str = "",
    *,
    halves: bool = True,
    numbers: Numbers | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number (from 1) and its object, of a file of JSON lines; ``halves`` and ``numbers`` are those
    of ``json_lines``.

    Raises:
        ValueError: a line is damaged, holds no object, or lacks a field of ``needs``. The message ends with ``advice``.
    """
    for number, found in json_lines(path, halves=halves, numbers=numbers):
        try:
            if isinstance(found, str):
                raise _Damaged(found)
            yield number, checked_object(found, needs or {})
        except ValueError as error:
            raise ValueError(_sentence(f"{path}, line {number}", error, advice)) from None


def checked_object(found: Any, needs: Fields) -> dict[str, Any]:
    """Return ``found`` if it is an object with the fields of ``needs``; else raise a ValueError that says what
    ``found`` is, or which field is missing or of another type."""
    if not isinstance(found, dict):
        raise ValueError(f"it holds {_shown(found)}; a mapping of names to values is needed")
    for name, kind in needs.items():
        if name not in found:
            raise ValueError(f"it has no `{name}`, which must be {_in_words(kind)}")
        if not _is_of(found[name], kind):
            raise ValueError(f"its `{name}` is {_shown(found[name])}; it must be {_in_words(kind)}")
    return found


def _decoded(content: bytes, mark: bool = True) -> str:
    """Decode ``content`` as UTF-8 text. ``mark``: a byte order mark may stand before it."""
    try:
        return content.decode("utf-8-sig" if mark else "utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise _Damaged(f"the byte 0x{byte:02x} is no UTF-8; it must be saved as UTF-8", line) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object's keys and values. Raises _KeyTwice for a key that stands twice."""
    found = {sys.intern(name): value for name, value in pairs}  # a million rows share one copy of their columns' names
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwice(next(name for name in names if names.count(name) > 1))
    return found


def _decoder(whole: Callable[[str], Any], other: Callable[[str], Any]) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_once, parse_int=whole, parse_float=other)


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _value_of(text: str, decoder: json.JSONDecoder = _DECODER) -> Any:
    """Return the value of JSON ``text``. Raises a _Damaged that says why, if it cannot be read."""
    if not text.strip("\0 \t\r\n"):
        raise _Damaged("zero bytes, as a lost write leaves them" if "\0" in text else "it is empty; JSON is needed")
    try:
        found = decoder.decode(text)
    except json.JSONDecodeError as error:
        line = ""
        if error.pos < len(text):
            line = text.split("\n")[error.lineno - 1][:_SHOWN]
        if line:
            shown = f" of {line!a}"
        else:
            shown = ", where the text ends (cut?)"
        raise _Damaged(f"not JSON: {error.msg}, column {error.colno}{shown}", error.lineno) from None
    except RecursionError:
        raise _Damaged(_too_deep()) from None
    except _KeyTwice as error:
        key = str(error)
        lines = [text.count("\n", 0, at.start()) + 1 for at in re.finditer(rf'"{re.escape(key)}"\s*:', text)]
        second = lines[1] if len(lines) == 2 else None
        raise _Damaged(f"the key {key!a} stands twice in one object; leave one out", second) from None
    except ValueError as error:  # a whole number of more digits than Python reads
        raise _Damaged(f"not JSON that can be read: {error}") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deeper(found, DEEPEST):
        raise _Damaged(_too_deep())
    return found


def _too_deep() -> str:
    return f"it is nested more than {DEEPEST} deep"


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and mappings are nested more than ``levels`` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return True


def _refuse_halves(found: dict[str, Any]) -> None:
    """Raise _Damaged for text that is cut between two code units (lone surrogates)."""
    for name, value in found.items():
        if half := HALF.search(json.dumps([name, value], ensure_ascii=False)):
            said = f"column {name!a} holds {half[0]!a}, half of a character (a lone surrogate)"
            raise _Damaged(f"{said}; mend or leave out that text")


def _is_of(value: Any, kind: type | UnionType) -> bool:
    """Return whether ``value`` is of the type ``kind``. A whole number also is a ``float``, a switch is no number."""
    kinds = get_args(kind) or (kind,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def _in_words(kind: type | UnionType) -> str:
    """Return a type in words: ``text or null``."""
    return " or ".join(_IN_WORDS.get(one, one.__name__) for one in get_args(kind) or (kind,))


def _shown(value: Any) -> str:
    """Return the first ``_SHOWN`` characters of ``value`` as JSON."""
    text = json.dumps(value, default=str)
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}…"


def _sentence(path: object, error: ValueError, advice: str) -> str:
    """Return a message: the place, its line if ``error`` knows it, what is wrong, and the advice."""
    line = getattr(error, "line", None)
    return f"{path}{f', line {line}' if line else ''}: {error}{f': {advice}' if advice else ''}"
