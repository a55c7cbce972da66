"""The gold of a coding task: what data sets write in a column of tests, as one of three kinds.

    assertions   Python text with ``assert`` (MBPP, HumanEval's ``check(candidate)``, ``def test_…``), or a list of such lines
    pairs        [{"input": …, "output": …}, …], [[input, output], …], {"input(s)": […], "output(s)": […]}: a script's text
    calls        the same beside an ``entry_point`` (or ``fn_name``): a function's arguments, as a list, and what it must return

Any of them may be JSON text, as a column of mixed types often is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.verifiers.code.client import Tests, packed_calls

_INPUT, _OUTPUT, _FUNCTION = ("input", "inputs"), ("output", "outputs"), ("fn_name", "entry_point")


def read_tests(value: Any, entry_point: str | None = None) -> Tests | None:
    """The tests of one row; None where there are none to be had."""
    value = _from_json(value)
    if isinstance(value, str):
        return Tests("assertions", value, entry_point) if value.strip() else None
    if isinstance(value, Mapping):
        named = next((value[name] for name in _FUNCTION if value.get(name)), None)
        return _read_pairs(_columns(value), entry_point or named, wrapped=bool(value.get("fn_name")))
    if not isinstance(value, Sequence) or not len(value):
        return None
    if all(isinstance(one, str) for one in value):
        return Tests("assertions", "\n".join(value), entry_point)
    return _read_pairs([_pair(one) for one in value], entry_point)


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _columns(value: Mapping[str, Any]) -> list[tuple[Any, Any] | None]:
    """``{"input": [a, b], "output": [c, d]}``, the form in which ``datasets`` gives a list of structs, or one pair alone."""
    given, expected = _of(value, _INPUT), _of(value, _OUTPUT)
    if not isinstance(given, list) or not isinstance(expected, list) or len(given) != len(expected):
        return [_pair(value)]
    return list(zip(given, expected, strict=True))


def _pair(one: Any) -> tuple[Any, Any] | None:
    if isinstance(one, Mapping):
        given, expected = _of(one, _INPUT), _of(one, _OUTPUT)
        return None if expected is None else (given, expected)
    if isinstance(one, Sequence) and not isinstance(one, str) and len(one) == 2:
        return one[0], one[1]
    return None


def _of(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if name in row), None)


def _read_pairs(pairs: list[tuple[Any, Any] | None], entry_point: str | None, wrapped: bool = False) -> Tests | None:
    """``wrapped``: APPS and TACO put what a function must return into a list of one; where every row does, it is taken out, too."""
    whole = [pair for pair in pairs if pair is not None]
    if not whole or len(whole) < len(pairs):
        return None
    if entry_point is None:
        return Tests("pairs", [[_as_text(given), _as_text(expected)] for given, expected in whole])
    wrapped = wrapped and all(isinstance(expected, list) and len(expected) == 1 for _, expected in whole)
    calls = [
        (given if isinstance(given, list | tuple) else [given], expected, *(expected if wrapped else ()))
        for given, expected in whole
    ]
    try:
        return Tests("calls", packed_calls(calls), entry_point)
    except ValueError:
        return None


def _as_text(value: Any) -> str:
    """Lines may come as a list; numbers are written out."""
    if isinstance(value, list | tuple):
        return "\n".join(_as_text(one) for one in value)
    return "" if value is None else str(value)


__all__ = ["read_tests"]
