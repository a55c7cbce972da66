"""Programs against tests, seen from the trainer: many at once, in order, in worker processes that can be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from grpo_lab.io import own_cores
from grpo_lab.sandbox.pool import Limits, WorkerPool
from grpo_lab.sandbox.wire import pack

_HANDLER = "grpo_lab.sandbox.judge:judge"
_LATE_S = 0.8
"""After the limit a worker has this long to say so before it is killed itself."""
_ROOM_BYTES = 1 << 30
_AT_LEAST = {
    "the files of this user": {"namespaces", "user", "landlock"},
    "the network and from other processes": {"namespaces", "seccomp"},
}
Kind = Literal["assertions", "calls", "pairs"]


@dataclass(frozen=True)
class Tests:
    """What a program is tested with.

    Attributes:
        kind: ``assertions`` (``tests`` is Python text), ``calls`` (``[[arguments, expected], …]`` of ``entry_point``)
            or ``pairs`` (``[[input, output], …]`` of a script, texts).
    """

    kind: Kind
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
    """``(arguments, expected, or this, …)`` of function calls, ready to be sent. ``ValueError`` for what is no plain
    data."""

    def refuse(value: Any) -> Any:
        raise ValueError(f"a {type(value).__name__} is no plain data")

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
        limits = Limits(
            cpu_seconds=wall_seconds, wall_seconds=wall_seconds + _LATE_S, memory_bytes=memory_bytes + _ROOM_BYTES
        )
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.pool = WorkerPool(_HANDLER, limits=limits, size=workers or max(1, own_cores() // ranks))
        self._common = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "memory_bytes": memory_bytes}
        self._wanted = walls
        self._missing: dict[str, str] | None = None

    @property
    def missing(self) -> dict[str, str]:
        """Wall → why this machine does not give it (empty: it does). Tried out in a worker, once."""
        if self._missing is None:
            self._missing = _missing_here(self._wanted is None or "namespaces" in self._wanted)
        return self._missing

    @property
    def walls(self) -> list[str]:
        """The walls in force, in the order of ``walls.WALLS``."""
        missing = self.missing
        if self._wanted is None:
            given = [name for name, why in missing.items() if not why]
            for what, enough in _AT_LEAST.items():
                if not enough & set(given):
                    raise ValueError(
                        f"nothing here keeps a model-written program from {what}: one of {sorted(enough)} is needed, "
                        "and this machine "
                        f"gives {given} ({missing}). Run it elsewhere, or name the walls that are enough for you: "
                        f"`walls: {given}`"
                    )
            return given
        unknown = [name for name in self._wanted if name not in missing]
        lacking = {name: missing[name] for name in self._wanted if missing.get(name)}
        if unknown or lacking:
            raise ValueError(
                f"`walls` asks for {list(self._wanted)}; unknown: {unknown}, and this machine does not give {lacking}. "
                f"Known: {list(missing)}; None takes what the machine gives"
            )
        return list(self._wanted)

    def judge(self, trials: Sequence[tuple[str, Tests]], *, stop_early: bool) -> list[Trial]:
        """One ``Trial`` per (program, tests), in order. With ``stop_early`` the first failed test ends a trial."""
        if not trials:
            return []
        common = {**self._common, "walls": self.walls, "stop_early": stop_early}
        jobs = [
            {**common, "kind": tests.kind, "program": program, "tests": tests.tests, "entry_point": tests.entry_point}
            for program, tests in trials
        ]
        outcomes = self.pool.run(jobs)
        return [Trial(**one.value) if one.status == "ok" else Trial(0, 0, "limit", one.reason) for one in outcomes]

    def close(self) -> None:
        """End the worker processes (they also end with this object)."""
        self.pool.close()


@lru_cache(maxsize=2)
def _missing_here(view: bool) -> dict[str, str]:
    """Wall → why this machine does not give it, with or without a view. A worker of its own tries, without this judge's
    limits."""
    if sys.platform != "linux":
        raise RuntimeError(
            "model-written programs are run on Linux alone: the walls are the Linux kernel's, and this is "
            f"{sys.platform}"
        )
    pool = WorkerPool(_HANDLER, limits=Limits(cpu_seconds=60.0, wall_seconds=180.0, memory_bytes=1 << 31), size=1)
    try:
        outcome = pool.run([{"kind": "walls", "view": view}])[0]
    finally:
        pool.close()
    if outcome.status != "ok":
        raise RuntimeError(f"which walls this machine gives could not be tried: {outcome.reason}")
    return dict(outcome.value)
