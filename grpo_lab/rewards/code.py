"""CodeReward: does the program that the model wrote pass the row's tests?

    all      1[every test passes]
    share    tests passed / tests

Sources: HumanEval (arXiv 2107.03374), MBPP (2108.07732), CodeRL (2207.01780). Tests run in one process. The program
runs in another, sandboxed one and answers with data (docs/algorithms/code_reward.md: what that protects from).

The column of tests holds assertions, pairs of input and output for a script, or calls of a function. The forms of many
data sets are read (the same page lists them), also as JSON text or as Python prints it (SYNTHETIC-1).
"""

from __future__ import annotations

import ast
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from grpo_lab.rewards.completion import completion_text, program_text
from grpo_lab.sandbox.client import CodeJudge, Tests, Trial
from grpo_lab.sandbox.wire import pack, refuse

_INPUT = ("input", "inputs")
_OUTPUT = ("output", "outputs")
_FUNCTION = ("fn_name", "func_name")
_CALLED = ("functional", "function_call")
_FORMS = "read are Python text with `assert`, and inputs with outputs (docs/algorithms/code_reward.md lists the forms)"
_LOG = logging.getLogger("grpo_lab")


def read_tests(value: Any, entry_point: str | None = None) -> Tests:
    """Read the tests of one row, in any of the forms that data sets use (docs/algorithms/code_reward.md).

    Args:
        value: the entry of the column ``tests``: Python text with assertions, or cases of input and output, or either
            of them as JSON.
        entry_point: name of the function that the tests call, if the row has it in a column of its own.

    Raises:
        ValueError: the tests cannot be used, with the reason; also if a script that prints nothing, or a function that
            returns None, would pass all cases. Whether a text of assertions asserts anything is not checked here.
    """
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
    cases = [_case(one) for one in cases]
    named = {_function(case) for case in cases}
    called = {bool(_function(case)) or _first(case, ("testtype", "type")) in _CALLED for case in cases}
    if len(named) > 1 or len(called) > 1:
        raise ValueError(f"cases of several functions, or of calls beside scripts: {sorted(named)}")
    name = entry_point or named.pop() or cases[0].get("entry_point")
    by_name = called.pop()
    if name:
        return Tests("calls", _calls(cases, by_name), str(name))
    if by_name:
        raise ValueError("the function that the cases call has no name: give it in the column `entry_point`")
    pairs = [[_as_text(case["input"]), _as_text(case["output"], needed=True)] for case in cases]
    if not any(expected.strip() for _, expected in pairs):
        raise ValueError("no case expects any output: a program that prints nothing would be right")
    return Tests("pairs", pairs)


def _from_text(value: Any) -> Any:
    """Parse a text that begins like a list or a mapping, as JSON or as a Python literal; return all else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value.strip())
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return value


def _columns(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split ``{"input": [a, b], "output": [c, d]}``, as ``datasets`` gives a list of structs, into cases.

    A mapping without two lists of one length is a single case; with the key ``inputs`` lists of different lengths
    raise ValueError.
    """
    given = _first(value, _INPUT)
    expected = _first(value, _OUTPUT)
    if not isinstance(given, list) or not isinstance(expected, list):
        return [value]
    rows = len(given)
    if rows != len(expected):
        if "inputs" in value:
            raise ValueError(f"{rows} inputs and {len(expected)} outputs; they must be one to one")
        return [value]
    lists = {name for name, column in value.items() if isinstance(column, list) and len(column) == rows}
    return [{name: column[row] if name in lists else column for name, column in value.items()} for row in range(rows)]


def _case(one: Any) -> Mapping[str, Any]:
    """Return a case with the keys ``input`` and ``output``."""
    if isinstance(one, Mapping) and any(name in one for name in _OUTPUT):
        return {**one, "input": _first(one, _INPUT), "output": _first(one, _OUTPUT)}
    if isinstance(one, list | tuple) and len(one) == 2:
        return {"input": one[0], "output": one[1]}
    raise ValueError(f"a case without an output: {one!r:.60}; {_FORMS}")


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _function(case: Mapping[str, Any]) -> str:
    """Return the name of the function that a case says it calls; empty if it says none."""
    about = _from_text(case.get("metadata"))
    return str(_first(case, _FUNCTION) or (_first(about, _FUNCTION) if isinstance(about, Mapping) else None) or "")


def _calls(cases: list[Mapping[str, Any]], by_name: bool) -> list[list[Any]]:
    """Return for each case [list of arguments, accepted value, further accepted value, …], each packed for the sandbox.

    ``by_name``: the cases themselves say that they are calls of a function, as in APPS and TACO. Then a text holds
    JSON, one argument a line. These data sets put the expected value into a list of one; if every case does so, the
    value inside that list is accepted, too.
    """
    calls = [(case["input"], case["output"]) for case in cases]
    if by_name and all(isinstance(given, str) for given, _ in calls):
        calls = [(_json_lines(given), _json_lines(expected)[0]) for given, expected in calls]
    wrapped = by_name and all(isinstance(expected, list) and len(expected) == 1 for _, expected in calls)
    if all(expected is None or (wrapped and expected == [None]) for _, expected in calls):
        raise ValueError("every case expects None: a function that does nothing would be right")
    lists = [(given if isinstance(given, list | tuple) else [given], expected) for given, expected in calls]
    accepted = [(list(given), expected, *(expected if wrapped else ())) for given, expected in lists]
    return [[pack(one, refuse) for one in call] for call in accepted]


def _json_lines(text: Any) -> list[Any]:
    """Parse each line of a text as JSON; a value that is no text is returned as a list of one."""
    if not isinstance(text, str):
        return [text]
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError):
        raise ValueError(f"the arguments of a call are read as JSON, one a line; got {text!r:.60}") from None


def _as_text(value: Any, needed: bool = False) -> str:
    """Write a value as text; a list becomes lines. None becomes an empty text, or raises ValueError if a text is
    ``needed``."""
    if isinstance(value, list | tuple):
        return "\n".join(_as_text(one, needed) for one in value)
    if value is None and needed:
        raise ValueError("a case without an output: a program that prints nothing would be right")
    return "" if value is None else str(value)


class CodeReward:
    """Reward the program in a completion (``program_text``) by the tests in the row's column ``tests``.

    Args:
        score: ``"all"``: 1.0 for all tests passed, else 0.0; ``"share"``: the share of tests passed.
        timeout_s: CPU seconds of one run of the program: all the calls of a text of assertions, or one input/output
            pair.
        wall_s: wall-clock seconds for one completion and all its tests. A verdict comes at most a second later.
        memory_bytes: address space of the program.
        batch_s: seconds that each worker may spend, per thousand completions begun, on those that reach a limit. After
            half of these seconds a completion has a tenth of its time; after all of them none is begun. A completion
            that is not judged for this reason gets None, and is counted.
        workers: completions judged at once; None: one per core, shared among the ranks of this machine.
        walls: the protections between the program and this machine that must be in force (``grpo_lab.sandbox.walls``);
            None: all that the machine gives.

    A run that the machine killed (SIGKILL that no limit sent, as when its memory runs out) is judged once more, alone;
    then it gets None. ``counts`` tallies ``passed``, ``failed``, ``limit``, ``unusable``, ``unjudged`` since
    construction.
    """

    columns = ("tests",)  # what `LabTrainer` looks for in the data set before anything is loaded

    def __init__(
        self,
        score: Literal["all", "share"] = "all",
        *,
        timeout_s: float = 5.0,
        wall_s: float = 30.0,
        memory_bytes: int = 1 << 30,
        batch_s: float = 300.0,
        workers: int | None = None,
        walls: list[str] | None = None,
    ) -> None:
        if score not in ("all", "share"):
            raise ValueError(f"score must be 'all' or 'share'; got {score!r}")
        if not (timeout_s > 0 and wall_s > 0 and batch_s > 0):
            got = f"{timeout_s!r}, {wall_s!r} and {batch_s!r}"
            raise ValueError(f"timeout_s, wall_s and batch_s must be positive seconds; got {got}")
        if memory_bytes < 1 << 26:
            raise ValueError(f"memory_bytes must be at least 2**26, what Python itself needs; got {memory_bytes}")
        self.score = score
        self.__name__ = "code_reward"  # TRL names its metrics after this
        self.counts: Counter[str] = Counter()
        self._judge = CodeJudge(timeout_s, wall_s, memory_bytes, batch_s, workers, walls)
        self._said = False

    def __repr__(self) -> str:
        return f"CodeReward(score={self.score!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_said": False}

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        tests: Sequence[Any] | None = None,
        entry_point: Sequence[str | None] | None = None,
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the rewards in order; None if a row's tests cannot be used, or its program was not judged.

        ``entry_point``: the column with the name of the function that the tests call, if the data set has it. TRL's
        ``log_metric`` gets the shares of the ends ``limit``, ``unusable`` and ``unjudged``, and the number of walls.
        """
        if completions is None:
            raise ValueError("CodeReward needs completions=[...]; got none")
        if tests is None:
            raise ValueError(f"CodeReward needs the column 'tests'; the columns given are {sorted(columns)}")
        trials = self.judge(completions, tests, entry_point)
        if log_metric is not None and trials:
            for name in ("limit", "unusable", "unjudged"):
                log_metric(f"code_reward/{name}", sum(trial.end == name for trial in trials) / len(trials))
            log_metric("code_reward/walls", float(len(self.in_force)))
        paid = [float(one.all_passed) if self.score == "all" else one.passed / max(one.total, 1) for one in trials]
        return [score if one.scorable else None for one, score in zip(trials, paid, strict=True)]

    def judge(
        self, completions: Sequence[Any], tests: Sequence[Any], entry_point: Sequence[str | None] | None = None
    ) -> list[Trial]:
        """Run the program of each completion against its row's tests, and return how many of them it passed and how it
        ended. Equal programs with equal tests are run once."""
        if entry_point is None:
            names: list[str | None] = [None] * len(tests)
        else:
            names = list(entry_point)
        if not len(completions) == len(tests) == len(names):
            counts = f"{len(completions)} completions, {len(tests)} tests and {len(names)} entry points"
            raise ValueError(f"got {counts}; they must be one to one")
        golds = [_tests_or_why(value, name or None) for value, name in zip(tests, names, strict=True)]
        keys = [
            (program_text(completion_text(text)), repr(gold)) for text, gold in zip(completions, golds, strict=True)
        ]
        wanted = {key: (key[0], gold) for key, gold in zip(keys, golds, strict=True) if isinstance(gold, Tests)}
        if wanted:
            self._say_what_is_in_force()
        found = self._judge.judge(list(wanted.values()), stop_early=self.score == "all")
        verdicts = dict(zip(wanted, found, strict=True))
        trials = [verdicts[key] if isinstance(gold, Tests) else gold for key, gold in zip(keys, golds, strict=True)]
        for trial in trials:
            if trial.end != "done":
                self.counts[trial.end] += 1
            elif trial.all_passed:
                self.counts["passed"] += 1
            else:
                self.counts["failed"] += 1
        return trials

    @property
    def in_force(self) -> list[str]:
        """The walls (protections) between a program and this machine, as tried out here
        (``grpo_lab.sandbox.walls``)."""
        return self._judge.walls

    def warm_up(self) -> None:
        """Try the walls, log which are in force, and start the worker's imports. `LabTrainer` calls it before it
        loads a model. Raises ValueError if too few walls are in force here, or not those that were asked for."""
        self._say_what_is_in_force()
        self._judge.pool.warm_up()

    def _say_what_is_in_force(self) -> None:
        if not self._said:
            self._said = True
            walls = self.in_force
            without = {name: why for name, why in self._judge.missing.items() if name not in walls}
            said = "CodeReward runs model-written programs behind: %s; not in force: %s"
            _LOG.log(logging.WARNING if without else logging.INFO, said, walls, without or "nothing")

    def close(self) -> None:
        """End the worker processes now (they also end with this object and at exit)."""
        self._judge.close()


def _tests_or_why(value: Any, entry_point: str | None) -> Tests | Trial:
    """Return the tests of a row or, if they cannot be used, a trial that says why."""
    try:
        return read_tests(value, entry_point)
    except ValueError as error:
        return Trial(0, 0, "unusable", str(error))
