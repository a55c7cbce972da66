"""Start a process in a jail with an empty folder, wait for it, and end it with everything it started.

    worker ── watcher ── jailed process (the first one of its namespaces) ── what it starts

``spawn`` forks the watcher (``_watch``). The watcher enters the namespaces, if they are one of the ``walls``, and forks
the jailed process (``_inside``), which puts up the other walls and then runs its task. When that ends, or when the
worker does, the watcher ends all its descendants and then itself. It adopts orphaned processes, so it also finds
children in sessions of their own.

A program may leave a hundred thousand files, or folders nested deeper than a path can be long. So its folder is removed
by descriptors, without recursion, until at most ``_PATIENCE_S`` after its deadline, or after its end if that is later.
A later jail removes what is left.
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

from grpo_lab.io import LOCKED_WITHIN_S
from grpo_lab.sandbox import kernel, walls
from grpo_lab.sandbox.walls import Cell

_CLEARING_S = 0.5
"""Seconds that a watcher takes at most to end all descendants."""
_GRACE_S = 0.7
"""Seconds that the worker gives a watcher to end, before it kills the watcher."""
_PREFIX = "grpo_lab_code_"
_PATIENCE_S = 0.2
"""Seconds that removing folders may take, for a program's own folder counted from its deadline if that is later."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ALIVE = 8
"""Descriptor of the jailed process until its task begins: a pipe that becomes readable when the watcher ends."""
_FAULT = 9
"""Descriptor of the jailed process until its task begins: a pipe for the text of an error in putting up the walls."""


class Jailed:
    """The worker's handle on one jail.

    Attributes:
        status: None until the jail has ended, then the exit status of the jailed process (−n if signal n ended it).
        usage: resources that all its processes used together; None until the jail has ended.
        stopped: whether ``kill`` ended it.
        fault: text of the error by which a wall could not be put up, or by which a task failed that did not replace the
            process by another program; empty if there was none.
    """

    def __init__(self, watcher: int, fault: int) -> None:
        self._watcher = watcher
        self._fault_pipe = fault
        self._handle = os.pidfd_open(watcher)
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.stopped = False
        self.fault = ""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the jail has ended, for ``select``."""
        return self._handle

    def poll(self) -> int | None:
        """Return ``status``, after looking whether the jail has ended."""
        if self.status is None:
            pid, raw, usage = os.wait4(self._watcher, os.WNOHANG)
            if pid:
                self._end(raw, usage)
        return self.status

    def _end(self, raw: int, usage: resource.struct_rusage) -> None:
        """Record how the watcher ended (``raw``: status of ``wait4``), and close the descriptors."""
        self.status = os.waitstatus_to_exitcode(raw)
        self.usage = usage
        with contextlib.suppress(BlockingIOError):
            self.fault = os.read(self._fault_pipe, 4096).decode("utf-8", "replace")
        os.close(self._fault_pipe)
        os.close(self._handle)

    def kill(self) -> None:
        """End the jailed process and all that it started; return when nothing of it is left."""
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
        """Return whether neither SIGKILL nor the limit of processor time ended it."""
        return self.status not in (-signal.SIGKILL, -signal.SIGXCPU)

    def killed_from_outside(self, cpu_seconds: float) -> bool:
        """Return whether a SIGKILL ended it that came neither from ``kill`` nor from its limit of ``cpu_seconds``.
        Behind ``namespaces`` or ``seccomp`` no program can send it to itself.

        At its limit a program gets SIGXCPU; if it survives that, SIGKILL a second later. A whole second, because the
        kernel counts clock ticks against the limit, and on a busy machine these run ahead of ``usage``.
        """
        if self.status != -signal.SIGKILL or self.stopped or self.usage is None:
            return False
        return self.usage.ru_utime + self.usage.ru_stime < math.ceil(cpu_seconds)


def spawn(task: Callable[[], None], keep: Mapping[int, int], cell: Cell) -> Jailed:
    """Start ``task`` in a jail and return its handle at once.

    Args:
        task: function without arguments; it usually replaces the process by another program.
        keep: descriptor in the jail → descriptor here. Of 0, 1 and 2, those not named are ``/dev/null``; no other
            descriptor is open in the jail.
        cell: the walls, the folder and the limits.
    """
    fault, theirs = os.pipe()
    os.set_blocking(fault, False)
    watcher = os.fork()
    if watcher == 0:
        _run_and_exit(theirs, _watch, task, {**keep, _FAULT: theirs}, cell, os.getppid())
    os.close(theirs)
    return Jailed(watcher, fault)


def _run_and_exit(fault: int, function: Callable[..., int | None], *args: Any) -> NoReturn:
    """Call ``function`` in a forked child and exit with its result (None is 0), never returning into the parent's code.
    The text of an exception goes to the descriptor ``fault``, and the status is 1."""
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
    """Be the watcher: fork the jailed process, wait for it or for SIGTERM, and end all descendants. Return the exit
    status of the jailed process, or end by the signal that ended it. ``worker``: pid of the worker."""
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
            _run_and_exit(_FAULT, _inside, task, {**keep, _ALIVE: alive}, cell, job)
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
    """End all descendants of this watcher. If the job has a ``user`` of its own, first kill all processes of that user.
    Then stop the remaining ones, so that they cannot multiply, and kill them. Orphans are found as well, in whatever
    session they are, since they become children of the watcher (``adopt_orphans``)."""

    def end_user(user: int) -> None:
        walls.become(user)
        if os.getuid() == user:  # not a user that other processes share
            os.kill(-1, signal.SIGKILL)

    if user is not None and os.fork() == 0:
        _run_and_exit(_FAULT, end_user, user)
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
    """Return the pids of all descendants of a process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
    except OSError:
        return []
    return children + [one for child in children for one in _below(child)]


def _inside(task: Callable[[], None], keep: Mapping[int, int], cell: Cell, job: int) -> None:
    """Be the jailed process: set its descriptors, put up the walls, and run the task. ``job``: pid of the watcher, as
    seen from outside of the jail."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    # By way of high numbers, since a number wanted in the jail may be in use here.
    parked = {there: os.dup2(here, 100 + there) for there, here in {0: null, 1: null, 2: null, **keep}.items()}
    for there, here in parked.items():
        os.dup2(here, there)
    _close_all_but(set(parked))
    walls.put_up(cell, job)
    if select.select([_ALIVE], [], [], 0)[0]:
        return  # the watcher ended before `put_up` tied this process to it
    os.close(_ALIVE)
    os.set_inheritable(_FAULT, False)  # closed by the kernel once another program has begun
    task()


def _close_all_but(wanted: set[int]) -> None:
    """Close all descriptors except ``wanted``."""
    last = 0
    for there in [*sorted(wanted), 1 << 20]:
        if last < there:  # closerange(0, 0) would close all
            os.closerange(last, there)
        last = there + 1


@contextlib.contextmanager
def empty_folder(up: frozenset[str], deadline: float) -> Iterator[str]:
    """Make a folder for the block and yield its path; remove it, at the latest soon after ``deadline`` (monotonic
    seconds). If ``namespaces`` is one of the walls ``up``, make none and yield the jail's own ``/tmp``."""
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
    """Open the folder ``name`` in the folder ``here``, close ``here``, and return the new descriptor."""
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
    """Remove jail folders of this user that no living worker has locked."""
    until = time.monotonic() + _PATIENCE_S
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = os.open(place, _FOLDER)
            try:
                found = os.fstat(held)
                if found.st_uid == os.geteuid() and time.time() - found.st_ctime > LOCKED_WITHIN_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(str(place), until)
            finally:
                os.close(held)
