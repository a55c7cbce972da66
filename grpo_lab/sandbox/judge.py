"""Judge one program by one row's tests, inside a worker process (``pool.WorkerPool``), in jails and under one clock.

This process runs neither the program nor the tests. It starts the processes that do, reads what they write, and ends
everything at the limit. It ends itself when the trainer has ended. The way of a job depends on its kind
(``client.Tests``):

    assertions, calls    ``_tested``: a tester and the program, each in a jail, joined by a socket. The tester asks the
                         program for values and writes one sign per test to a pipe, which is read here.
    pairs                ``_scripts``: for each pair the program runs as a script, in a jail of its own. What it prints
                         is compared here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from functools import cache
from pathlib import Path
from typing import Any

from grpo_lab.sandbox import kernel, tester, walls
from grpo_lab.sandbox.fork_server import AtLimit, KilledFromOutside, peak_bytes, took_much
from grpo_lab.sandbox.jail import Jailed, empty_folder, spawn
from grpo_lab.sandbox.walls import Cell
from grpo_lab.sandbox.wire import frame

_HERE = Path(__file__).parent
_OUTPUT_BYTES = 1 << 20
_NO_WALLS = "the walls of a jail could not be put up: "
_PLACES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": walls.INSIDE, "TMPDIR": walls.INSIDE, "LANG": "C.UTF-8"}
_SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "2"}
_BOOT = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("wire.py", "program.py"))
_BOOT = _BOOT.replace("from __future__ import annotations\n", "")
"""Source of the jailed process as one text, since the jailed interpreter can see none of our files."""


def _program(kind: str) -> None:
    """Replace the jailed process by a new interpreter that calls ``program.run(kind, 3)``."""
    text = f"{_BOOT}\nrun({kind!r}, 3)"
    os.execve(walls.INTERPRETER, [walls.INTERPRETER, "-s", "-S", "-B", "-X", "utf8", "-c", text], _PLACES | _SETTINGS)


def _clock_ran_out(deadline: float) -> bool:
    """Return whether ``deadline`` (monotonic seconds) has passed. End this process if the trainer has ended."""
    if os.getppid() != _parent():  # the jails die with this process
        os._exit(1)
    return time.monotonic() >= deadline


@cache
def _parent() -> int:
    """Return the pid of the fork server, which forked this worker and ends with the trainer. The first call must come
    before any program runs, while the fork server is still the parent."""
    return os.getppid()


def _follow(process: Jailed, pipe: int, most: int, deadline: float) -> tuple[bytes, bool]:
    """Read ``pipe`` until ``process`` has ended; kill it at ``deadline`` or beyond ``most`` bytes. Return what it
    wrote, and whether it kept within both."""
    os.set_blocking(pipe, False)
    watched: list[Any] = [process, pipe]
    said = bytearray()
    while process.poll() is None:
        if _clock_ran_out(deadline) or len(said) > most:
            process.kill()
            return bytes(said), False
        wait = min(0.25, max(0.0, deadline - time.monotonic()))
        select.select(watched, [], [], wait)
        _drain(pipe, said, most)
    _drain(pipe, said, most)
    return bytes(said), len(said) <= most


def _drain(pipe: int, said: bytearray, most: int) -> None:
    """Append to ``said`` what the pipe holds now, until there are more than ``most`` bytes."""
    with contextlib.suppress(BlockingIOError):
        while len(said) <= most:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                time.sleep(0.001)  # closed, though the process runs on: readable for ever, and the caller would spin
                return
            said += chunk


def judge(job: dict[str, Any]) -> dict[str, Any] | AtLimit:
    """Judge one job. The workers of ``client.CodeJudge`` call this as their handler.

    Args:
        job: ``kind``, ``tests`` and ``entry_point`` of ``client.Tests``; ``program``, its source; ``walls``, the names
            of the walls to put up; ``stop_early``; ``cpu_seconds``, ``wall_seconds`` and ``memory_bytes`` of
            ``client.CodeJudge``. A job of the kind ``walls`` has ``view`` alone (``_missing``).

    Returns:
        The fields of a ``client.Trial``; if time or memory ran out, within ``AtLimit``, beside the seconds that it
        cost. For the kind ``walls``: wall → why this machine lacks it, "" if it has it.

    Raises:
        RuntimeError: a wall could not be put up.
        KilledFromOutside: somebody else killed the program or its tester.
    """
    _parent()
    if job["kind"] == "walls":
        return {name: _missing(name, job["view"]) for name in walls.WALLS}
    begun = time.monotonic()
    used = _processor_seconds()
    verdict = _judged(job)
    if verdict["end"] != "limit":
        return verdict
    clock_ran_out = time.monotonic() - begun >= job["wall_seconds"]
    return AtLimit(verdict, job["wall_seconds"] if clock_ran_out else _processor_seconds() - used)


def _processor_seconds() -> float:
    """Return the processor seconds of all jails of this worker that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _judged(job: dict[str, Any]) -> dict[str, Any]:
    """Check the tests, run them in the way of the job's kind, and return the fields of a ``client.Trial``."""
    walls_up = frozenset(job["walls"])
    if "namespaces" not in walls_up:
        kernel.hide_memory()
    deadline = time.monotonic() + job["wall_seconds"]
    if len(job["program"]) > 1 << 20:  # still judged: unusable tests must be found with any program
        job = {**job, "program": "raise SystemExit('too long')"}
    if job["kind"] == "pairs":
        return _scripts(job, walls_up, deadline)
    try:
        if job["kind"] == "assertions":
            _, total, _ = tester.compiled(job["tests"], job["entry_point"])
        else:
            total = len(job["tests"])
    except tester.NoTests as error:
        return _verdict("unusable", why=str(error))
    return _tested(job, walls_up, total, deadline)


def _verdict(end: str, passed: int = 0, total: int = 0, why: str = "") -> dict[str, Any]:
    return {"passed": passed, "total": total, "end": end, "why": why}


def _tested(job: dict[str, Any], walls_up: frozenset[str], total: int, deadline: float) -> dict[str, Any]:
    """Run a tester and a program, each in a jail and joined by a socket; return the verdict of the tester's report
    (``tester.Run``), in which ``total`` tests are expected."""
    asks, answers = socket.socketpair()
    report, writes = os.pipe()

    with asks, answers, empty_folder(walls_up, deadline) as folder, empty_folder(walls_up, deadline) as apart:
        cell = Cell(walls_up, folder, job["cpu_seconds"], job["memory_bytes"])
        program = spawn(lambda: _program("calls"), {3: answers.fileno()}, cell)
        for_tests = Cell(walls_up, apart, job["wall_seconds"], job["memory_bytes"] + (1 << 28))
        testing = spawn(lambda: tester.run(job, 3, 4), {3: asks.fileno(), 4: writes}, for_tests)
        try:
            asks.close()
            answers.close()
            os.close(writes)
            signs, ended = _follow(testing, report, _OUTPUT_BYTES, deadline)
            if not signs.endswith(b"."):
                select.select([program], [], [], 0.1)  # no more requests come, so it ends by itself, or has ended
            program.poll()
            ended = ended and program.ended_by_itself
        finally:
            os.close(report)
            testing.kill()
            program.kill()
    if fault := testing.fault or program.fault:
        raise RuntimeError(_NO_WALLS + fault)
    if b"?" in signs:
        return _verdict("unusable", 0, total, signs.partition(b"?")[2].decode())
    passed = signs.count(b"1")
    failed = signs.count(b"0")
    whole = signs.endswith(b".") and not failed and passed >= total
    total = max(total, passed + failed)
    if not whole:
        _refuse_killed(program, cell, "the program")
        _refuse_killed(testing, for_tests, "its tester")
        passed = min(passed, total - 1)  # an error between two tests is a failure too
    return _verdict("done" if ended else "limit", passed, total)


def _scripts(job: dict[str, Any], walls_up: frozenset[str], deadline: float) -> dict[str, Any]:
    """Run the program once for each pair of input and expected output; return the verdict."""
    passed = 0
    end = "done"
    for given, expected in job["tests"]:
        right, ended = _script(job, walls_up, given, expected, deadline)
        passed += right
        if not ended:
            end = "limit"
        if (not right and job["stop_early"]) or _clock_ran_out(deadline):
            break
    return _verdict(end, passed, len(job["tests"]))


def _script(
    job: dict[str, Any], walls_up: frozenset[str], given: str, expected: str, deadline: float
) -> tuple[bool, bool]:
    """Run the program as a script with ``given`` as its standard input.

    Returns:
        Whether it ended with status 0 and printed ``expected``, compared line by line without white space at their
        ends; and whether it ended by itself, within its limits.
    """
    ours, theirs = socket.socketpair()
    output, writes = os.pipe()
    typed = os.memfd_create("input")
    with ours, theirs, empty_folder(walls_up, deadline) as folder, os.fdopen(typed, "wb") as file:
        file.write(given.encode("utf-8", "surrogatepass"))
        file.flush()
        os.lseek(typed, 0, os.SEEK_SET)
        cell = Cell(walls_up, folder, job["cpu_seconds"], job["memory_bytes"])
        process = spawn(lambda: _program("script"), {0: typed, 1: writes, 3: theirs.fileno()}, cell)
        try:
            theirs.close()
            os.close(writes)
            ours.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):  # it ended before it read its program
                ours.sendall(frame({"load": job["program"]}))
            most = max(_OUTPUT_BYTES, 2 * len(expected.encode("utf-8", "surrogatepass")))
            said, ended = _follow(process, output, most, deadline)
        finally:
            os.close(output)
            process.kill()
    if process.fault:
        raise RuntimeError(_NO_WALLS + process.fault)
    _refuse_killed(process, cell, "the program")
    right = ended and process.status == 0 and _lines(said.decode("utf-8", "replace")) == _lines(expected)
    return right, ended and process.ended_by_itself


def _refuse_killed(process: Jailed, cell: Cell, who: str) -> None:
    """Raise ``KilledFromOutside`` if a SIGKILL from outside ended the process, which says nothing of the program.
    Behind neither ``namespaces`` nor ``seccomp`` the program may have killed itself, and nothing is raised."""
    if {"namespaces", "seccomp"} & cell.walls and process.killed_from_outside(cell.cpu_seconds):
        peak = 0
        if process.usage is not None:
            peak = peak_bytes(process.usage)
        unbounded = "seccomp" not in cell.walls  # memory in anonymous files does not count in the peak
        greedy = unbounded or took_much(peak, cell.memory_bytes)
        raise KilledFromOutside(f"{who} was ended by SIGKILL", greedy)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]  # `splitlines` would split at a form feed, too


@cache
def _missing(name: str, view_too: bool = True) -> str:
    """Return why the wall ``name`` cannot be put up on this machine; "" if a trial script runs behind it. ``view_too``:
    the wall ``user`` is tried together with ``namespaces``, if this machine has these."""
    if name in ("namespaces", "seccomp", "landlock") and not kernel.known_machine():
        return "not known for this system and processor"
    if name == "landlock" and not kernel.landlock_version():
        return "this kernel has none"
    if name == "user" and os.geteuid() != 0:
        return "only root may become another user"
    alone = name == "user" and (not view_too or bool(_missing("namespaces")))
    python = Path(walls.INTERPRETER)
    if alone and not all(way.stat().st_mode & 0o001 for way in (python, *python.parents)):
        return f"{walls.INTERPRETER} is in a folder that only its owner may enter"
    walls_up = {name, "limits"}
    if name == "user" and not alone:
        walls_up.add("namespaces")
    job = {"program": "print(1)", "cpu_seconds": 10.0, "memory_bytes": 1 << 29}
    try:
        right, _ = _script(job, frozenset(walls_up), "", "1", time.monotonic() + 20.0)
    except (RuntimeError, OSError) as error:
        return str(error)
    if right:
        return ""
    return "a trial program did not run behind it"
