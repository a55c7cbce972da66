"""Start a process in a jail with an empty folder, wait for it, and end it with everything it started.

    worker ── watcher ── jailed process (first of its namespaces) ── what it starts

A jailed process is isolated by the layers in ``walls``. Its watcher is a fork of the worker that only waits. It ends
when the worker does, and takes the jailed process along. It adopts orphaned processes, so it also finds children in
sessions of their own.

A program may leave a hundred thousand files, or folders nested deeper than a path can be long. So its folder is removed
by descriptors, without recursion, for at most ``_PATIENCE_S``. A later jail removes what is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import resource
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from grpo_lab.sandbox import kernel, walls
from grpo_lab.sandbox.walls import Cell

_CLEARING_S, _GRACE_S = 0.5, 0.7
_PREFIX = "grpo_lab_code_"
_PATIENCE_S, _OLD_S = 0.2, 5.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ALIVE, _FAULT = 8, 9
"""Descriptors of the jailed process until its task begins. The first shows that the watcher lives, the second takes an
error of the walls."""


class Jailed:
    """A running jail. ``status`` is None while it runs, then its exit status (−n if signal n ended it). ``usage`` is
    what all its processes used; ``stopped`` is True if we ended it. ``fault`` says why a wall could not be put up; the
    task then never began."""

    def __init__(self, watcher: int, fault: int) -> None:
        self._watcher = watcher
        self._fault_pipe = fault
        self._handle = os.pidfd_open(watcher)
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.stopped = False
        self.fault = ""

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._handle

    def poll(self) -> int | None:
        if self.status is None:
            pid, raw, usage = os.wait4(self._watcher, os.WNOHANG)
            if pid:
                self._end(raw, usage)
        return self.status

    def _end(self, raw: int, usage: resource.struct_rusage) -> None:
        self.status = os.waitstatus_to_exitcode(raw)
        self.usage = usage
        with contextlib.suppress(BlockingIOError):
            self.fault = os.read(self._fault_pipe, 4096).decode("utf-8", "replace")
        os.close(self._fault_pipe)
        os.close(self._handle)

    def kill(self) -> None:
        """End the process and all that it started; return once nothing of it is left."""
        if self.poll() is not None:
            return
        self.stopped = True
        os.kill(self._watcher, signal.SIGTERM)
        if not select.select([self._handle], [], [], _GRACE_S)[0]:
            os.kill(self._watcher, signal.SIGKILL)
        if self.status is None:
            _, raw, usage = os.wait4(self._watcher, 0)
            self._end(raw, usage)

    @property
    def ended_by_itself(self) -> bool:
        """True if neither SIGKILL nor the limit of its processor time ended it."""
        return self.status not in (-signal.SIGKILL, -signal.SIGXCPU)

    def killed_from_outside(self, cpu_seconds: float) -> bool:
        """Return whether it was ended by a SIGKILL that came neither from us nor from the limit of its processor time.
        Behind ``namespaces`` or ``seccomp`` no program can send it to itself.

        At its limit a program gets SIGXCPU. One that survives SIGXCPU gets SIGKILL a second later. The second is wide
        because the kernel holds a program to a count of clock ticks, which on a busy machine runs ahead of ``usage``.
        """
        if self.status != -signal.SIGKILL or self.stopped or self.usage is None:
            return False
        return self.usage.ru_utime + self.usage.ru_stime < math.ceil(cpu_seconds)


def spawn(task: Callable[[], None], keep: Mapping[int, int], cell: Cell) -> Jailed:
    """Run ``task`` in a jail. Its descriptors are ``keep`` (there → here), and ``/dev/null`` for the rest of 0 to 2."""
    fault, theirs = os.pipe()
    os.set_blocking(fault, False)
    watcher = os.fork()
    if watcher == 0:
        _last_resort(theirs, _watch, task, {**keep, _FAULT: theirs}, cell, os.getppid())
    os.close(theirs)
    return Jailed(watcher, fault)


def _last_resort(fault: int, function: Callable[..., int | None], *args: Any) -> NoReturn:
    """Call ``function`` in a forked child and exit with its result, never returning into the parent's code."""
    status = 1
    try:
        with contextlib.suppress(SystemExit):  # from the program, if its tests do not expect it
            status = function(*args) or 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(fault, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(status)


class _Stop(BaseException):
    """Raised in the watcher by SIGTERM."""


def _stop(number: int, frame: object) -> None:
    raise _Stop


def _watch(task: Callable[[], None], keep: Mapping[int, int], cell: Cell, worker: int) -> int:
    os.setsid()
    _close_all_but({0, 1, 2, *keep.values()})  # the trainer's socket, and the ends of other jails
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    job = os.getpid()
    if "namespaces" in cell.walls:
        walls.enter_namespaces()
    kernel.adopt_orphans()
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != worker:
        return 0
    alive, mine = os.pipe()
    try:
        signal.signal(signal.SIGTERM, _stop)
        inner = os.fork()
        if inner == 0:
            os.close(mine)
            _last_resort(_FAULT, _inside, task, {**keep, _ALIVE: alive}, cell, job)
        for fd in {*keep.values(), alive} - {0, 1, 2}:
            os.close(fd)
        status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    except _Stop:
        status = -signal.SIGKILL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own_user = "user" in cell.walls and "namespaces" not in cell.walls
    _end_descendants(walls.job_user(job) if own_user else None)
    if status < 0:  # it was ended by a signal: end by the same one, as no exit status can say so
        with contextlib.suppress(OSError):  # the handler of SIGKILL cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _end_descendants(user: int | None) -> None:
    """End all descendants. If the job has its own ``user``, first kill all processes of that user. Then stop the
    remaining ones, so that they cannot multiply, and kill them. Orphans become our children (``adopt_orphans``), in
    whatever session they are."""

    def end_user(user: int) -> None:
        walls.become(user)
        if os.getuid() == user:  # not a user that other processes share
            os.kill(-1, signal.SIGKILL)

    if user is not None and os.fork() == 0:
        _last_resort(_FAULT, end_user, user)
    deadline = time.monotonic() + _CLEARING_S
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        while fresh := set(_below(os.getpid())) - stopped:
            _signal(fresh, signal.SIGSTOP)
            stopped |= fresh
        _signal(stopped, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _below(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
    except OSError:
        return []
    return children + [one for child in children for one in _below(child)]


def _inside(task: Callable[[], None], keep: Mapping[int, int], cell: Cell, job: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    high = {there: os.dup2(here, 100 + there) for there, here in {0: null, 1: null, 2: null, **keep}.items()}
    for there, here in high.items():
        os.dup2(here, there)
    _close_all_but(set(high))
    walls.put_up(cell, job)
    if select.select([_ALIVE], [], [], 0)[0]:
        return  # the watcher had ended before that
    os.close(_ALIVE)
    os.set_inheritable(_FAULT, False)  # closed by the kernel once another program has begun
    task()


def _close_all_but(wanted: set[int]) -> None:
    last = 0
    for there in [*sorted(wanted), 1 << 20]:
        if last < there:  # closerange(0, 0) would close all
            os.closerange(last, there)
        last = there + 1


@contextlib.contextmanager
def empty_folder(up: frozenset[str], deadline: float) -> Iterator[str]:
    """Yield a new folder and remove it soon after ``deadline`` (monotonic). Behind ``namespaces`` yield the jail's own
    ``/tmp``."""
    if "namespaces" in up:
        yield walls.INSIDE
        return
    _remove_abandoned()
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    held = os.open(folder, _FOLDER)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)  # the kernel releases it when this process ends
        os.chmod(folder, 0o777 if "user" in up else 0o700)
        yield folder
    finally:
        remove_folder(folder, max(deadline, time.monotonic()) + _PATIENCE_S)
        os.close(held)


def remove_folder(folder: str, until: float) -> bool:
    """Remove ``folder``; return whether all of it was gone by ``until`` (monotonic seconds)."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        here = os.open(folder, _FOLDER)
        try:
            os.fchmod(here, 0o700)  # from now on nobody else comes in
            while time.monotonic() < until:
                below = None
                with os.scandir(here) as entries:
                    for entry in itertools.takewhile(lambda _: time.monotonic() < until, entries):
                        if entry.is_dir(follow_symlinks=False):
                            below = entry.name
                        else:
                            os.unlink(entry.name, dir_fd=here)
                if below is not None:
                    here = _enter_folder(here, below)
                    names.append(below)
                elif names:
                    here = _enter_folder(here, "..")
                    os.rmdir(names.pop(), dir_fd=here)
                else:
                    os.rmdir(folder)
                    return True
        finally:
            os.close(here)
    return False


def _enter_folder(here: int, name: str) -> int:
    try:
        there = os.open(name, _FOLDER, dir_fd=here)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=here)
        there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    if name != "..":
        os.fchmod(there, 0o700)
    return there


def _remove_abandoned() -> None:
    """Remove folders of this user that no worker holds any more."""
    until = time.monotonic() + _PATIENCE_S
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = os.open(place, _FOLDER)
            try:
                found = os.fstat(held)
                if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _OLD_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(str(place), until)
            finally:
                os.close(held)
