"""Judge programs by tests, from the trainer: many at once, in order, in worker processes that can be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from grpo_lab.io import own_cores
from grpo_lab.sandbox.pool import JobOutcome, WorkerPool
from grpo_lab.sandbox.workers import Limits

_HANDLER = "grpo_lab.sandbox.judge:judge"
_BEFORE_FILES = {"namespaces", "user", "landlock"}
#: What a program must be kept from → walls of which one is needed for that.
_AT_LEAST = {
    "the files of this user": _BEFORE_FILES,
    "the network and from other processes": {"namespaces", "seccomp"},
}


@dataclass(frozen=True)
class Tests:
    """Tests of one program.

    Attributes:
        kind: what ``tests`` is. ``assertions``: Python text with ``assert``. ``calls``: a list of ``[arguments,
            expected]``, or with several accepted values ``[arguments, expected, expected, …]``. ``pairs``: a list of
            ``[input, output]`` of a script, as texts.
        tests: the tests, in the form of that kind.
        entry_point: name of the function to test, or ``Class().method``; needed for ``calls``.
    """

    kind: Literal["assertions", "calls", "pairs"]
    tests: Any
    entry_point: str | None = None


@dataclass(frozen=True)
class Trial:
    """Result of one program.

    Attributes:
        passed: number of tests that it passed.
        total: number of tests.
        end: how the trial ended. ``limit``: time or memory ran out. ``unusable``: the tests are no valid tests.
            ``unjudged``: the process was killed from outside twice, or its batch had no time left.
        why: the reason for such an end, where one is known.
    """

    passed: int
    total: int
    end: Literal["done", "limit", "unusable", "unjudged"]
    why: str = ""

    @property
    def scorable(self) -> bool:
        """Return whether the counts say something about the program."""
        return self.end not in ("unusable", "unjudged")

    @property
    def all_passed(self) -> bool:
        return self.scorable and 0 < self.total == self.passed


class CodeJudge:
    """Judges programs in worker processes, behind isolation layers (``walls.WALLS``).

    Args:
        cpu_seconds: processor seconds of one run of the program. Each of ``pairs`` is a run; all other tests of a
            program share one.
        wall_seconds: seconds on the clock for all tests of a program.
        memory_bytes: address space of the program.
        batch_seconds: ``workers.Limits.batch_seconds``.
        workers: number of worker processes; None: this rank's share of the machine's cores.
        walls: names of the layers; None: all that this machine has.

    Raises:
        ValueError: at the first use of ``walls``, if this machine lacks a named layer, if it has too few, or if root
            runs programs that could reach its files.
    """

    def __init__(
        self,
        cpu_seconds: float,
        wall_seconds: float,
        memory_bytes: int,
        batch_seconds: float,
        workers: int | None,
        walls: list[str] | None,
    ) -> None:
        limits = Limits(
            cpu_seconds=wall_seconds,
            wall_seconds=wall_seconds + 0.8,  # a worker has this long to say that time is up before it is killed itself
            memory_bytes=memory_bytes + (1 << 30),
            batch_seconds=batch_seconds,
        )
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.pool = WorkerPool(_HANDLER, limits=limits, size=workers or max(1, own_cores() // ranks))
        self._common = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "memory_bytes": memory_bytes}
        self._wanted = walls

    @cached_property
    def missing(self) -> dict[str, str]:
        """Return wall → why this machine lacks it, "" if it has it. A worker tries each wall once."""
        return _missing_here(self._wanted is None or "namespaces" in self._wanted)

    @property
    def walls(self) -> list[str]:
        """Return the names of the walls in use: those asked for, else all that this machine has. Raises ``ValueError``
        if these are too few."""
        available = [name for name, why in self.missing.items() if not why]
        if self._wanted is None:
            self._refuse_too_few(available)
            return available
        lacking = {name: self.missing.get(name, "unknown") for name in self._wanted if name not in available}
        if lacking:
            raise ValueError(
                f"`walls` asks for {list(self._wanted)}, and this machine does not give {lacking}. Known: "
                f"{list(self.missing)}; None takes what the machine gives"
            )
        if _is_root() and not _BEFORE_FILES & set(self._wanted):
            raise ValueError(
                f"`walls` is {list(self._wanted)}, and this is root: a program could write to every file of this "
                "machine, /proc/sysrq-trigger and cgroup.kill among them; add one of "
                f"{sorted(_BEFORE_FILES)}, or train as another user"
            )
        return list(self._wanted)

    def _refuse_too_few(self, available: list[str]) -> None:
        """Raise ``ValueError`` if the walls that this machine has are fewer than ``_AT_LEAST`` asks for."""
        for what, enough in _AT_LEAST.items():
            if enough & set(available):
                continue
            if _is_root() and enough is _BEFORE_FILES:
                otherwise = "or as another user than root"
            else:
                otherwise = f"or name the walls that are enough for you: `walls: {available}`"
            raise ValueError(
                f"nothing here keeps a model-written program from {what}: one of {sorted(enough)} is needed, and "
                f"this machine gives {available} ({self.missing}). Run it elsewhere, {otherwise}"
            )

    def judge(self, trials: Sequence[tuple[str, Tests]], *, stop_early: bool) -> list[Trial]:
        """Return one ``Trial`` per (program, tests), in order. ``stop_early`` ends a trial at the first failed test."""
        if not trials:
            return []
        common = {**self._common, "walls": self.walls, "stop_early": stop_early}
        jobs = [
            {**common, "kind": tests.kind, "program": program, "tests": tests.tests, "entry_point": tests.entry_point}
            for program, tests in trials
        ]
        return [self._trial(one) for one in self.pool.run(jobs)]

    def _trial(self, found: JobOutcome) -> Trial:
        """Convert the pool's outcome of a job. Where the worker crashed or ran out of time, ``end`` is ``limit``."""
        if found.status == "ok":
            return Trial(**found.value)
        # Behind neither of these the program may have killed its worker itself.
        kept_apart = {"namespaces", "seccomp"} & set(self.walls)
        return Trial(0, 0, "unjudged" if found.status == "unjudged" and kept_apart else "limit", found.reason)

    def close(self) -> None:
        """End the worker processes. They also end with this object."""
        self.pool.close()


def _is_root() -> bool:
    return os.geteuid() == 0


@lru_cache(maxsize=2)
def _missing_here(view: bool) -> dict[str, str]:
    """Return wall → why this machine lacks it, found by a worker that is started for it. ``view``: the argument
    ``view_too`` of ``judge._missing``."""
    if sys.platform != "linux":
        raise RuntimeError(f"model-written programs are run behind the Linux kernel's walls; this is {sys.platform}")
    limits = Limits(cpu_seconds=60.0, wall_seconds=180.0, memory_bytes=1 << 31)
    with closing(WorkerPool(_HANDLER, limits=limits, size=1)) as pool:
        outcome = pool.run([{"kind": "walls", "view": view}])[0]
    if outcome.status != "ok":
        raise RuntimeError(f"which walls this machine gives could not be tried: {outcome.reason}")
    return dict(outcome.value)
