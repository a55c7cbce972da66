"""A program that is written, run against the first of its tests in the sandbox, and mended if they fail.

    run(program="def f(x): …")           1 of 3
    run(program="def f(x): …")           3 of 3
    done

The reward is whether the program that was run last passes all tests, those too that `run` does not tell of.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

from grpo_lab.data import coding_tasks
from grpo_lab.data.made import LAST
from grpo_lab.rewards import CodeReward

SHOWN = 3
"""How many of a row's tests `run` tells of."""
ONE_AT_A_TIME = threading.Lock()


@functools.cache
def judge() -> CodeReward:
    """Return the judge of all environments of this process."""
    return CodeReward(score="share")


def passed(program: str, tests: tuple[str, ...]) -> int:
    """Return how many of the tests a program passes. Samples of a group often write the same program: it runs once."""
    with ONE_AT_A_TIME:
        return passed_in_sandbox(program, tests)


@functools.lru_cache(maxsize=10_000)
def passed_in_sandbox(program: str, tests: tuple[str, ...]) -> int:
    """Run the program in the sandbox and return how many of the tests it passes."""
    fenced = f"```python\n{program}\n```"
    return judge().judge([fenced], ["\n".join(tests)])[0].passed


class Program:
    """The environment: TRL calls ``reset`` with the row's columns, the policy calls ``run``."""

    def reset(self, tests: str, **_: Any) -> None:
        self._tests = tuple(tests.split("\n"))
        self._program = ""

    def run(self, program: str) -> str:
        """
        Run a program against some tests.

        Args:
            program: A Python program that defines the function f.
        """
        self._program = program
        return f"{passed(program, self._tests[:SHOWN])} of {SHOWN}"

    def get_reward(self) -> float:
        shown = self._tests[:SHOWN]
        if passed(self._program, shown) < SHOWN:
            return 0.0
        return float(passed(self._program, self._tests) == len(self._tests))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in plain values."""
        return {"tests": list(self._tests), "program": self._program}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: What `state_dict` returned.
        """
        self._tests = tuple(state["tests"])
        self._program = state["program"]


def tasks(
    n: int,
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (1, 2),
    slips: float = 0.0,
    given_up: float = 0.0,
) -> list[dict[str, Any]]:
    """Return ``n`` coding tasks.

    Args:
        slips: share of worked solutions whose first program has a wrong line.
        given_up: share of those that end there. The next turn mends the others.
    """
    rng = random.Random(f"program/{seed}/{split}")
    rows = coding_tasks(n, seed, split, steps)
    return [{**row, "worked_solution": transcript(row, rng, slips, given_up)} for row in rows]


def transcript(row: dict[str, Any], rng: random.Random, slips: float, given_up: float) -> list[dict[str, Any]]:
    """Return the messages of a worked solution."""
    done = {"role": "assistant", "content": "done"}
    tests = row["tests"].split("\n")[:SHOWN]
    right = ran(row["solution"], SHOWN)
    if rng.random() >= slips:
        return [*right, done]
    wrong = with_slip(row["solution"])
    first = ran(wrong, passed_here(wrong, tests))
    if rng.random() < given_up:
        return [*first, done]
    return [*first, *right, done]


def ran(program: str, right: int) -> list[dict[str, Any]]:
    """Return the messages of a call and its answer."""
    function = {"name": "run", "arguments": {"program": program}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "name": "run", "content": f"{right} of {SHOWN}"}]


def with_slip(program: str) -> str:
    """Return the program with another end: the one that stands next in the table of ends."""
    *lines, last = program.split("\n")
    ends = [step.code for step in LAST]
    place = ends.index(last.strip())
    return "\n".join([*lines, f"    {ends[(place + 1) % len(ends)]}"])


def passed_here(program: str, tests: list[str]) -> int:
    """Return how many tests a program of ours passes; its lines are those of the tables in ``grpo_lab.data.made``."""
    made: dict[str, Callable[..., Any]] = {}
    exec(program, made)
    return sum(holds(test, made) for test in tests)


def holds(test: str, made: dict[str, Any]) -> bool:
    """Return whether an assertion holds."""
    call, _, expected = test.removeprefix("assert ").rpartition(" == ")
    return bool(eval(call, made) == eval(expected))
