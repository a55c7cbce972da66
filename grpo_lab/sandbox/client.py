"""Programs against tests, seen from the trainer: many at once, in order, in worker processes that can be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from grpo_lab.io import own_cores
from grpo_lab.sandbox.pool import Limits, WorkerPool
from grpo_lab.sandbox.wire import pack, refuse

_HANDLER = "grpo_lab.sandbox.judge:judge"
_AT_LEAST = {
    "the files of this user": {"namespaces", "user", "landlock"},
    "the network and from other processes": {"namespaces", "seccomp"},
}


@dataclass(frozen=True)
class Tests:
    """What a program is tested with: ``assertions`` (``tests`` is Python text), ``calls`` (``[[arguments, expected],
    …]`` of ``entry_point``) or ``pairs`` (``[[input, output], …]`` of a script, texts)."""

    kind: Literal["assertions", "calls", "pairs"]
    tests: Any
    entry_point: str | None = None


@dataclass(frozen=True)
class Trial:
    """How a program did: tests passed of all; ``end`` is ``done``, ``limit`` (time or memory ran out, or its worker was
    lost) or ``unusable`` (the tests are no tests)."""

    passed: int
    total: int
    end: Literal["done", "limit", "unusable"]
    why: str = ""

    @property
    def all_passed(self) -> bool:
        return self.end != "unusable" and 0 < self.total == self.passed


def packed_calls(calls: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """``(arguments, expected, or this, …)`` of function calls, ready to be sent. ``ValueError``: no plain data."""
    return [[pack(list(given), refuse), *(pack(one, refuse) for one in accepted)] for given, *accepted in calls]


class CodeJudge:
    """Runs programs behind the walls that this machine gives (``walls``), or behind those that are named.

    Args:
        cpu_seconds: processor time of one run: all the calls of a text of assertions, or one input/output pair.
        wall_seconds: on the clock, for one program and all its tests.
        memory_bytes: address space of the program.
        workers: programs judged at once; None: one a core, shared among the ranks of this machine
            (``LOCAL_WORLD_SIZE``).
        walls: the walls that must be in force, no others; None: all that can. ``ValueError`` at first use where a named
            one cannot, or where none is named and too little can.
    """

    def __init__(
        self,
        *,
        cpu_seconds: float = 5.0,
        wall_seconds: float = 30.0,
        memory_bytes: int = 1 << 30,
        workers: int | None = None,
        walls: Sequence[str] | None = None,
    ) -> None:
        late = wall_seconds + 0.8  # a worker has this long to say that time is up before it is killed itself
        limits = Limits(cpu_seconds=wall_seconds, wall_seconds=late, memory_bytes=memory_bytes + (1 << 30))
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.pool = WorkerPool(_HANDLER, limits=limits, size=workers or max(1, own_cores() // ranks))
        self._common = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "memory_bytes": memory_bytes}
        self._wanted = walls

    @cached_property
    def missing(self) -> dict[str, str]:
        """Wall → why this machine does not give it (empty: it does). Tried out in a worker, once."""
        return _missing_here(self._wanted is None or "namespaces" in self._wanted)

    @property
    def walls(self) -> list[str]:
        """The walls in force, in the order of ``walls.WALLS``."""
        given = [name for name, why in self.missing.items() if not why]
        if self._wanted is not None:
            lacking = {name: self.missing.get(name, "unknown") for name in self._wanted if name not in given}
            if lacking:
                raise ValueError(
                    f"`walls` asks for {list(self._wanted)}, and this machine does not give {lacking}. Known: "
                    f"{list(self.missing)}; None takes what the machine gives"
                )
            return list(self._wanted)
        for what, enough in _AT_LEAST.items():
            if not enough & set(given):
                raise ValueError(
                    f"nothing here keeps a model-written program from {what}: one of {sorted(enough)} is needed, and "
                    f"this machine gives {given} ({self.missing}). Run it elsewhere, or name the walls that are enough "
                    f"for you: `walls: {given}`"
                )
        return given

    def judge(self, trials: Sequence[tuple[str, Tests]], *, stop_early: bool) -> list[Trial]:
        """One ``Trial`` per (program, tests), in order. With ``stop_early`` the first failed test ends a trial."""
        if not trials:
            return []
        common = {**self._common, "walls": self.walls, "stop_early": stop_early}
        jobs = [
            {**common, "kind": tests.kind, "program": program, "tests": tests.tests, "entry_point": tests.entry_point}
            for program, tests in trials
        ]
        done = self.pool.run(jobs)
        return [Trial(**one.value) if one.status == "ok" else Trial(0, 0, "limit", one.reason) for one in done]

    def close(self) -> None:
        """End the worker processes (they also end with this object)."""
        self.pool.close()


@lru_cache(maxsize=2)
def _missing_here(view: bool) -> dict[str, str]:
    """``CodeJudge.missing``, with or without a view. A worker of its own tries, without this judge's limits."""
    if sys.platform != "linux":
        raise RuntimeError(
            f"model-written programs are run on Linux alone, behind its kernel's walls; not {sys.platform}"
        )
    pool = WorkerPool(_HANDLER, limits=Limits(cpu_seconds=60.0, wall_seconds=180.0, memory_bytes=1 << 31), size=1)
    try:
        outcome = pool.run([{"kind": "walls", "view": view}])[0]
    finally:
        pool.close()
    if outcome.status != "ok":
        raise RuntimeError(f"which walls this machine gives could not be tried: {outcome.reason}")
    return dict(outcome.value)
