"""Run a row's tests against a program in another process, and report each result on a separate pipe.

``compiled`` parses the tests and marks each of them: the statement becomes the block of ``with __one_test__():``.
``Run`` executes the result in the namespace ``Names``. Names that neither the tests nor Python define are the
program's, and are asked for over the channel (``remote.Program``). The model's code never runs in this process, so it
cannot patch, trace, skip or read a test.

A *test* is a statement that asserts or raises: at the top of the text, in ``check``, or a function ``test_…`` as a
whole. If there is none, a statement that is a call is a test. If ``check`` is called more than once, each statement
that calls it is one test. ``assert True`` and its like count for nothing. An error between two tests ends the run.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_lab.sandbox.remote import Program, ProgramGone, Unsendable, lacks_a_module
from grpo_lab.sandbox.wire import RECURSION, refuse_tag, unpack

UNIT = "__one_test__"
_DEFINES_BY_NAME = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)
_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


class NoTests(ValueError):
    """Raised if the tests are no valid Python, or contain no test."""


class _Enough(BaseException):
    """Raised to end the run after a failed test, if one failure decides or the program has ended."""


class Run:
    """Run of one program's tests.

    Args:
        program: the program.
        report: function that is called with ``1`` or ``0`` for each test, then ``.`` after all of them; or with ``?``
            and the reason, if the tests turn out to be unusable.
        stop_early: whether to end at the first test that fails.
    """

    def __init__(self, program: Program, report: Callable[[bytes], Any], stop_early: bool) -> None:
        self.program = program
        self.report = report
        self.stop_early = stop_early

    @contextlib.contextmanager
    def unit(self) -> Iterator[None]:
        """Run one test, the block of ``with __one_test__():``, and report it. An exception of the block fails the test
        and is not raised, unless it ends the run or makes the tests unusable."""
        passed = True
        try:
            yield
        except BaseException as error:
            if isinstance(error, Unsendable | _Enough) or lacks_a_module(error):
                raise
            passed = False
        passed = passed and not self.program.gone and not self.program.refused
        self.program.refused = False
        self.report(b"1" if passed else b"0")
        if not passed and (self.stop_early or self.program.gone):
            raise _Enough

    def tests(self, code: types.CodeType, entry_point: str | None, source: str, called: frozenset[str]) -> None:
        """Load the program, then run tests of the kind ``assertions``. An error between two tests ends the run.

        Args:
            code: the marked tests (``compiled``).
            entry_point: name of the program's function to test, which the tests then see under this name even if it is
                one of Python's.
            source: the program.
            called: names that the tests only call (``compiled``).
        """
        try:
            self.program.load(source)
            names = Names(self.program, called)
            if entry_point is not None and entry_point.isidentifier():
                names[entry_point] = self.program.get(entry_point)
            names[UNIT] = self.unit
            module = types.ModuleType("solution")  # `from solution import f`, as some data sets write it
            module.__getattr__ = names.program_value  # type: ignore[method-assign]
            sys.modules["solution"] = module
            exec(code, names)
            self.report(b"." if not self.program.gone else b"")
        except BaseException as error:
            if isinstance(error, Unsendable) or lacks_a_module(error):
                self.report(b"?" + ascii(str(error)).encode()[:300])

    def calls(self, pairs: Sequence[Sequence[Any]], entry_point: str, source: str) -> None:
        """Load the program ``source``, then run tests of the kind ``calls``: in each of ``pairs`` the first entry has
        the arguments of ``entry_point``, and the result must be one of the further entries (``same``)."""
        try:
            self.program.load(source)
            owner, dot, name = entry_point.partition("().")
            if dot:
                function = getattr(self.program.get(owner)(), name)
            else:
                function = self.program.get(entry_point)
            for given, *accepted in pairs:
                with self.unit():
                    found = function(*unpack(given, refuse_tag))
                    assert any(same(found, unpack(one, refuse_tag)) for one in accepted)
            self.report(b".")
        except (_Enough, ProgramGone, Exception):
            return


def same(value: Any, expected: Any) -> bool:
    """Return whether two values are equal, by ``==`` or as JSON: tuples count as lists, and numbers that are keys of a
    dictionary as texts."""
    return bool(value == expected) or _as_json(value) == _as_json(expected)


def _as_json(value: Any) -> Any:
    """Return ``value`` with lists for tuples, and texts for numbers that are keys of a dictionary."""
    if isinstance(value, dict):
        numbers = (int, float, bool)
        made = {json.dumps(key) if type(key) in numbers else key: _as_json(one) for key, one in value.items()}
        return made if len(made) == len(value) else value  # `1` beside `"1"` is more than JSON has
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return value


class Names(dict[str, Any]):
    """Namespace in which the tests run. A name is looked up among the tests' own, Python's built-ins, the standard
    library's modules (which need no import; a name in ``called`` means none), and the program's."""

    def __init__(self, program: Program, called: frozenset[str]) -> None:
        super().__init__({"__name__": "__main__", "__builtins__": builtins})
        self._program = program
        self._called = called

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)  # Python looks there next
        if name in sys.stdlib_module_names and name not in self._called:
            return importlib.import_module(name)
        if name not in self._program.names:
            raise KeyError(name)
        return self._program.get(name)

    def program_value(self, name: str) -> Any:
        """Return the program's value of a name, for ``from solution import …``."""
        if name not in self._program.names:
            raise AttributeError(name)
        return self._program.get(name)


def compiled(tests: str, entry_point: str | None) -> tuple[types.CodeType, int, frozenset[str]]:
    """Compile a row's text of assertions, with each test in it marked.

    Args:
        tests: the text, in Python.
        entry_point: name in the program that a function ``check`` is called with; None if the row has none.

    Returns:
        The code, the number of tests, and the names that stand in the text as the function of a call and nowhere else
        (``select`` in ``select([2, 1])``): they are not taken for a module.

    Raises:
        NoTests: the text is no Python, contains no test, asks nothing of a program, or holds a class of ``unittest``.
    """
    try:
        tree = ast.parse(tests)
        if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
            raise NoTests("nothing in the tests can fail: they have no `assert`")
        called = _only_called(tree)
        if entry_point is None and not _asked_for(tree, called):
            raise NoTests(
                "every name in the tests is Python's or their own, so they ask nothing of a program; a function that "
                "is named as one of Python's (`sum`) needs the column `entry_point`"
            )
        bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
        if any("TestCase" in (getattr(base, "id", None), getattr(base, "attr", None)) for base in bases):
            raise NoTests("classes of `unittest` are not run: write `assert` in functions `test_…`")
        tree.body = _marked_module(_unguarded(tree.body), entry_point)
        count = _uses(tree.body, UNIT)
        if not count:
            raise NoTests("nothing in the tests is an assertion or a call")
        return compile(ast.fix_missing_locations(tree), "<tests>", "exec"), count, called
    except NoTests:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoTests(f"the tests are no Python: {error}") from None


def _only_called(tree: ast.Module) -> frozenset[str]:
    """Return the names that the tests use in calls only, as ``select`` in ``select([2, 1])``. No module is meant by
    them, even if one has this name."""
    nodes = list(ast.walk(tree))
    calls = [one.func.id for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
    uses = Counter(one.id for one in nodes if isinstance(one, ast.Name))
    return frozenset(name for name, times in Counter(calls).items() if times == uses[name])


def _asked_for(tree: ast.Module, called: frozenset[str]) -> set[str]:
    """Return the names that must come from the program: those that the tests use and neither they nor Python define,
    and ``solution`` if they import it. ``called``: names that mean no module."""
    nodes = list(ast.walk(tree))
    used = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    made = {one.id for one in nodes if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
    made |= {one.name for one in nodes if isinstance(one, _DEFINES_BY_NAME) and one.name}
    made |= {one.arg for one in nodes if isinstance(one, ast.arg)}
    imported = [one for one in nodes if isinstance(one, ast.alias)]
    made |= {(one.asname or one.name).partition(".")[0] for one in imported}
    whence = {one.module for one in nodes if isinstance(one, ast.ImportFrom)} | {one.name for one in imported}
    return (used - made - set(dir(builtins)) - (sys.stdlib_module_names - called)) | ({"solution"} & whence)


def _unguarded(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replace each ``if __name__ == "__main__":`` by its body. Skipped, it would be a test that passes."""
    guard = ast.dump(ast.parse('__name__ == "__main__"', mode="eval").body)
    unguarded: list[ast.stmt] = []
    for one in body:
        if isinstance(one, ast.If) and ast.dump(one.test) == guard:
            unguarded += one.body
        else:
            unguarded.append(one)
    return unguarded


def _marked_module(body: list[ast.stmt], entry_point: str | None) -> list[ast.stmt]:
    """Mark the tests of a whole text (this module's docstring says what is a test). A function ``check`` that nothing
    calls is called with ``entry_point``, and functions ``test…`` without arguments are called."""
    functions = [one for one in body if isinstance(one, ast.FunctionDef)]
    check = next((one for one in functions if one.name == "check"), None)
    if check is not None and entry_point is not None and not _calls(body, "check"):
        call = ast.parse(f"check({entry_point})").body[0]
        if _uses(body, "check"):  # within another function
            return [*(_unit(one) if _asserts(one) or _is_call(one) else one for one in body), _unit(call)]
        check.body = _marked(check.body)
        return [*body, call]
    if check is not None and _calls(body, "check") and _asserts_inside(check):
        if not _called_once(body, "check"):
            return [_unit(one) if _asserts(one) or _calls([one], "check") else one for one in body]
        check.body = _marked(check.body)
        return body
    tests = [one.name for one in functions if one.name.startswith("test") and not _takes_arguments(one)]
    uncalled = [name for name in tests if not _calls(body, name)]
    return _marked(body, calls_too=not uncalled) + [_unit(ast.parse(f"{name}()").body[0]) for name in uncalled]


def _takes_arguments(function: ast.FunctionDef) -> bool:
    return bool(function.args.args or function.args.posonlyargs or function.args.kwonlyargs)


def _marked(body: list[ast.stmt], calls_too: bool = True) -> list[ast.stmt]:
    """Mark the statements that can fail; if there is none and ``calls_too``, those that are a call."""
    asserting = [one for one in body if _asserts(one)]
    chosen = asserting or [one for one in body if calls_too and _is_call(one)]
    return [_unit(one) if one in chosen else one for one in body]


def _unit(statement: ast.stmt) -> ast.stmt:
    """Mark a statement as one test: put it into ``with __one_test__():``."""
    call = ast.Call(func=ast.Name(id=UNIT, ctx=ast.Load()), args=[], keywords=[])
    return ast.copy_location(ast.With(items=[ast.withitem(context_expr=call)], body=[statement]), statement)


def _asserts(statement: ast.stmt) -> bool:
    """Return whether a statement can fail when it is executed; a definition cannot."""
    return not isinstance(statement, _DEFINES) and _asserts_inside(statement)


def _asserts_inside(statement: ast.stmt) -> bool:
    """Return whether a statement contains a ``raise``, or an assertion other than ``assert True``."""
    nodes = list(ast.walk(statement))
    asserted = [one.test for one in nodes if isinstance(one, ast.Assert)]
    vain = [one for one in asserted if isinstance(one, ast.Constant) and one.value]
    return len(asserted) > len(vain) or any(isinstance(one, ast.Raise) for one in nodes)


def _is_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _calls(body: list[ast.stmt], name: str) -> list[ast.Name]:
    """Return where the function ``name`` is called outside of functions."""
    outside = [one for one in body if not isinstance(one, ast.FunctionDef)]
    calls = [n.func for one in outside for n in ast.walk(one) if isinstance(n, ast.Call)]
    return [function for function in calls if isinstance(function, ast.Name) and function.id == name]


def _called_once(body: list[ast.stmt], name: str) -> bool:
    """Return whether one statement is a call of the function, and nothing else names it.

    Only then are the statements in the function run once, and can be counted as tests. A comprehension would call it
    often, and it may call itself.
    """
    calls = [one.value for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
    alone = [one for one in calls if isinstance(one.func, ast.Name) and one.func.id == name]
    return len(alone) == _uses(body, name) == 1


def _uses(body: list[ast.stmt], name: str) -> int:
    """Count how often ``name`` stands in some statements."""
    return sum(isinstance(node, ast.Name) and node.id == name for one in body for node in ast.walk(one))


def run(job: dict[str, Any], channel: int, report: int) -> None:
    """Entry point of the tester's jail: run a job's tests.

    Args:
        job: ``kind``, ``tests``, ``entry_point``, ``program`` and ``stop_early`` (``judge.judge``).
        channel: descriptor of the socket to the program.
        report: descriptor that the signs of ``Run`` are written to.
    """
    random.seed(0)  # tests that draw their cases draw the same ones for every program
    sys.setrecursionlimit(RECURSION)
    one_run = Run(Program(channel), lambda sign: os.write(report, sign), job["stop_early"])
    if job["kind"] == "calls":
        one_run.calls(job["tests"], job["entry_point"], job["program"])
    else:
        code, _, called = compiled(job["tests"], job["entry_point"])
        one_run.tests(code, job["entry_point"], job["program"], called)
