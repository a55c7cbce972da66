"""The gold of a coding task: what data sets write in a column of tests, as one of three kinds.

    assertions   Python text with ``assert`` (MBPP, HumanEval's ``check(candidate)``, ``def test_…``), a list of such lines, or
                 {"functional": text} (LeetCode in rllm and code-r1)
    pairs        [{"input": …, "output": …}, …], [[input, output], …], {"input(s)": […], "output(s)": […]}: a script's text
    calls        the same with the name of a function (``fn_name``, ``entry_point``, or ``func_name`` in ``metadata``): its arguments, as a
                 list, and what it must return; or both as JSON text, an argument a line (LiveCodeBench, verl)

Any of them may be JSON text, as a column of mixed types often is, or written as Python prints it (SYNTHETIC-1).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.verifiers.code.client import Tests, packed_calls

_INPUT, _OUTPUT, _FUNCTION = ("input", "inputs"), ("output", "outputs"), ("fn_name", "func_name")
_CALLED = ("functional", "function_call")
_FORMS = "read are Python text with `assert`, and inputs with outputs (docs/algorithms/code_reward.md lists the forms)"


def read_tests(value: Any, entry_point: str | None = None) -> Tests:
    """The tests of one row. ``ValueError``: they cannot be used, and why."""
    value = _from_text(value)
    if isinstance(value, Mapping) and isinstance(value.get("functional"), str):
        value = value["functional"]
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        value = "\n".join(value)
    if isinstance(value, str) and value.strip():
        return Tests("assertions", value, entry_point)
    cases = _columns(value) if isinstance(value, Mapping) else value
    if not isinstance(cases, list | tuple) or not cases:
        raise ValueError(f"no tests: {value!r:.60}; {_FORMS}")
    return _read_cases([_case(one) for one in cases], entry_point)


def _from_text(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value.strip())
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return value


def _columns(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``{"input": [a, b], "output": [c, d]}``, the form in which ``datasets`` gives a list of structs, or one case alone."""
    given, expected = _first(value, _INPUT), _first(value, _OUTPUT)
    if not isinstance(given, list) or not isinstance(expected, list):
        return [value]
    rows = len(given)
    if rows != len(expected):
        if "inputs" in value:
            raise ValueError(f"{rows} inputs and {len(expected)} outputs; they must be one to one")
        return [value]
    lists = {name for name, column in value.items() if isinstance(column, list) and len(column) == rows}
    return [{name: one[at] if name in lists else one for name, one in value.items()} for at in range(rows)]


def _case(one: Any) -> Mapping[str, Any]:
    """One case, its ``input`` and ``output`` by these names."""
    if isinstance(one, Mapping) and any(name in one for name in _OUTPUT):
        return {**one, "input": _first(one, _INPUT), "output": _first(one, _OUTPUT)}
    if isinstance(one, list | tuple) and len(one) == 2:
        return {"input": one[0], "output": one[1]}
    raise ValueError(f"a case without an output: {one!r:.60}; {_FORMS}")


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _function(case: Mapping[str, Any]) -> str:
    """The name of the function that a case says it calls; empty where it says none."""
    about = _from_text(case.get("metadata"))
    return str(_first(case, _FUNCTION) or (_first(about, _FUNCTION) if isinstance(about, Mapping) else None) or "")


def _read_cases(cases: list[Mapping[str, Any]], entry_point: str | None) -> Tests:
    named = {_function(case) for case in cases}
    called = {bool(_function(case)) or _first(case, ("testtype", "type")) in _CALLED for case in cases}
    if len(named) > 1 or len(called) > 1:
        raise ValueError(f"cases of several functions, or of calls beside scripts: {sorted(named)}")
    name, by_name = entry_point or named.pop() or cases[0].get("entry_point"), called.pop()
    if name:
        return Tests("calls", _calls(cases, by_name), str(name))
    if by_name:
        raise ValueError("the function that the cases call has no name: give it in the column `entry_point`")
    pairs = [[_as_text(case["input"]), _as_text(case["output"], needed=True)] for case in cases]
    if not any(expected.strip() for _, expected in pairs):
        raise ValueError("no case expects any output: a program that prints nothing would be right")
    return Tests("pairs", pairs)


def _calls(cases: list[Mapping[str, Any]], by_name: bool) -> list[list[Any]]:
    """``by_name``: the cases themselves say that they are calls. Then a text holds JSON, an argument a line; and APPS and TACO put what
    a function must return into a list of one: where every case does, what is in it is right, too."""
    calls = [(case["input"], case["output"]) for case in cases]
    if by_name and all(isinstance(given, str) for given, _ in calls):
        calls = [(_json_lines(given), _json_lines(expected)[0]) for given, expected in calls]
    wrapped = by_name and all(isinstance(expected, list) and len(expected) == 1 for _, expected in calls)
    if all(expected is None or (wrapped and expected == [None]) for _, expected in calls):
        raise ValueError("every case expects None: a function that does nothing would be right")
    return packed_calls(
        [
            (given if isinstance(given, list | tuple) else [given], expected, *(expected if wrapped else ()))
            for given, expected in calls
        ]
    )


def _json_lines(text: Any) -> list[Any]:
    if not isinstance(text, str):
        return [text]
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError):
        raise ValueError(f"the arguments of a call are read as JSON, one a line; got {text!r:.60}") from None


def _as_text(value: Any, needed: bool = False) -> str:
    """Lines may come as a list; numbers are written out. What is missing is no empty text where text is ``needed``."""
    if isinstance(value, list | tuple):
        return "\n".join(_as_text(one, needed) for one in value)
    if value is None and needed:
        raise ValueError("a case without an output: a program that prints nothing would be right")
    return "" if value is None else str(value)


__all__ = ["read_tests"]
