"""A pool of killable worker processes: hard time limit per job, memory limit per worker, no lost jobs.

Why processes and not `signal.alarm` or threads: sympy can sit for minutes inside one C call (`9**9**9**9`), out of a
signal handler's or thread's reach; and TRL may call a reward from a thread, where signals do not work at all. Why our
own `Popen` and not `multiprocessing` spawn: spawn runs the caller's `__main__` again in every child, so a training
script without a `__name__` guard would start a second training. The other side of this one is `fork_server`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_lab.io import own_cores
from grpo_lab.sandbox.fork_server import take_frame
from grpo_lab.sandbox.wire import frame

_MOST_LOST = 8  # workers of one round whose end was nobody's fault
_BOOT = (
    "import json, sys; spec = json.loads(sys.argv[1]); sys.path[:] = spec['path']; "
    "from grpo_lab.sandbox.fork_server import main; main(*spec['args'])"
)
# What a worker sees of the environment. Tokens and keys of the training run are not among it; a fixed hash seed makes
# sympy's orderings, and with them the verdicts, the same in every process.
_INHERITED = "PATH LANG LC_ALL LD_LIBRARY_PATH PYTHONHOME VIRTUAL_ENV TMPDIR COVERAGE_PROCESS_START"
_FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_ANSWER_SECONDS = 10.0  # for a kill: the process asked does nothing else


class VerifierError(RuntimeError):
    """A bug in a verifier or a worker that cannot start: ours to fix, never the model's fault."""


@dataclass(frozen=True)
class Limits:
    """What one job may use up: `cpu_seconds`, enforced by the kernel (processor time, so that a busy machine makes no
    right answer a timeout), and `wall_seconds`, the end of one that sleeps or starves; and one worker: address space,
    and `startup_seconds` on the clock for its imports."""

    cpu_seconds: float = 5.0
    wall_seconds: float = 30.0
    memory_bytes: int = 1 << 30
    startup_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "startup_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if self.memory_bytes < 1 << 28:
            raise ValueError(f"memory_bytes must be at least 2**28, what imports need; got {self.memory_bytes}")


class ForkServerProcess:
    """The child that imports the handler and forks the workers (`fork_server.main`); its imports go on at first."""

    def __init__(self, handler: str, limits: Limits) -> None:
        self._handler, self._limits = handler, limits
        self._control, theirs = socket.socketpair()
        self._count, self._buffer = 0, bytearray()
        with theirs:
            longest = 2.0 * limits.wall_seconds + 10.0
            args = [theirs.fileno(), os.getpid(), handler, limits.memory_bytes, limits.cpu_seconds, longest]
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps({"path": sys.path, "args": args})],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _INHERITED.split() if name in os.environ} | _FIXED,
                start_new_session=True,  # Ctrl-C in the trainer's terminal is the trainer's to handle
            )

    def fork(self) -> WorkerProcess:
        """A new worker, ready as soon as the imports are done. `VerifierError` where this process is no more."""
        self._count += 1
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [frame({"fork": self._count})], [theirs.fileno()])
            except OSError as error:
                ours.close()
                code = self.process.poll()
                why = f"the process that starts workers of {self._handler} has ended with code {code}"
                raise VerifierError(why) from error
        return WorkerProcess(self, self._count, ours, self._limits)

    def kill(self, number: int) -> None:
        """End that worker, its process group with it, and wait until they are gone."""
        try:
            self._control.settimeout(_ANSWER_SECONDS)
            self._control.sendall(frame({"kill": number}))
            while (answer := take_frame(self._buffer)) is None or answer["gone"] != number:
                chunk = self._control.recv(1 << 12)
                if not chunk:
                    return self.end()  # it has ended, and its workers with it
                self._buffer += chunk
        except OSError:
            self.end(at_once=True)

    def end(self, at_once: bool = False) -> None:
        """End it and all workers, and reap it. `at_once`: do not wait for its imports."""
        with contextlib.suppress(OSError):  # `close` alone says nothing while a fork of the trainer has it too
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if at_once else _ANSWER_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class WorkerProcess:
    """One worker. `pid` is known once it is ready, and has said hello; `deadline` is monotonic seconds."""

    def __init__(self, server: ForkServerProcess, number: int, channel: socket.socket, limits: Limits) -> None:
        self._server, self._number, self._channel, self._limits = server, number, channel, limits
        self._buffer = bytearray()
        self.since = time.monotonic()
        self.pid: int | None = None
        self.deadline = self.since + limits.startup_seconds

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, payload: Any) -> bool:
        """Hand over a job and start its clock; False when the process is no longer there to take it."""
        if select.select([self], [], [], 0)[0]:
            return False  # nobody has asked it anything, so this is how it ended
        self.since = time.monotonic()
        self.deadline = self.since + self._limits.wall_seconds
        self._channel.settimeout(self._limits.wall_seconds)
        try:
            self._channel.sendall(frame({"job": payload}, most=None))
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Call when readable. The reply, None while it is incomplete; an end is a `crash`, a `timeout`, or `lost`."""
        try:
            chunk = self._channel.recv(1 << 16)
        except OSError:
            chunk = b""
        self._buffer += chunk
        message = take_frame(self._buffer)
        if message is None:
            if chunk:
                return None
            return {"crash": "it ended within a reply"} if self._buffer else {"lost": "ended with its fork server"}
        code = message.get("ended")
        if code is None:
            return dict(message)
        if code == -signal.SIGPROF:
            return {"timeout": f"used up {self._limits.cpu_seconds:g} s of processor time"}
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return {"crash": f"the process {how}"}

    def kill(self) -> None:
        """End the process group now: no zombie stays."""
        self._server.kill(self._number)
        self._channel.close()


@dataclass(frozen=True)
class JobOutcome:
    """What became of one job: `ok` with the handler's value, `timeout` or `crash` with a reason; wall-clock seconds."""

    status: Literal["ok", "timeout", "crash"]
    value: Any
    reason: str
    seconds: float


def _close_all(workers: list[WorkerProcess], servers: list[ForkServerProcess], owner_pid: int) -> None:
    """End the processes, unless this is a fork of the owner: they are not ours to end there."""
    if os.getpid() == owner_pid:
        for server in servers:
            server.end(at_once=not any(worker.pid for worker in workers))
    workers.clear()
    servers.clear()


class WorkerPool:
    """`size` processes that run `handler` on JSON payloads.

    Args:
        handler: `"package.module:function"`, imported in the child; `function(payload) -> JSON value`. It turns bad
            model text into a value of its own; an exception out of it is a bug and is raised here as `VerifierError`.
            Where its module has a function `prepare_worker`, that is called once, before any fork.
        limits: processor time and wall clock per job, bytes per worker.
        size: number of processes; None: half of the cores this process may use, between 1 and 4.

    Workers are forks of one process that has imported the handler; it starts on first need, or with `warm_up`. The pool
    may be called from any thread (calls take turns), survives pickling and forking (the copy starts processes of its
    own), and leaves no process behind at exit, at garbage collection, or when its own process is killed (-9 too).
    """

    def __init__(self, handler: str, *, limits: Limits | None = None, size: int | None = None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"size must be at least 1 process, or None for a default; got {size}")
        self.handler = handler
        self.limits = limits or Limits()
        self.size = size or min(4, max(1, own_cores() // 2))
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.workers: list[WorkerProcess] = []
        self._servers: list[ForkServerProcess] = []  # one at most; like the workers, what must not outlive the pool
        weakref.finalize(self, _close_all, self.workers, self._servers, self._pid)
        self.replaced = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"handler": self.handler, "limits": self.limits, "size": self.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers if worker.pid is not None]

    @property
    def fork_server_pid(self) -> int | None:
        return self._servers[0].process.pid if self._servers else None

    def warm_up(self) -> None:
        """Starts the imports in a process beside this one and returns at once: the first job then finds them done."""
        self._own()
        if self._lock.acquire(blocking=False):  # else a round is at it
            try:
                self.fork_server()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End all workers. The pool may be used again afterwards."""
        _close_all(self.workers, self._servers, self._pid)

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._reset()  # forked: the parent's processes and its lock (perhaps held) are not ours

    def fork_server(self) -> ForkServerProcess:
        """The running one; a new one where there is none."""
        if not self._servers or self._servers[0].process.poll() is not None:
            self._servers[:] = [ForkServerProcess(self.handler, self.limits)]
        return self._servers[0]

    def run(self, payloads: Sequence[Any]) -> list[JobOutcome]:
        """Runs every payload and returns outcomes in the same order. Raises `VerifierError` on a bug in the handler."""
        self._own()
        with self._lock:
            try:
                return _Round(self, payloads).outcomes()
            except BaseException:
                self.close()  # a half-finished round must not answer the next one
                raise


class _Round:
    def __init__(self, pool: WorkerPool, payloads: Sequence[Any]) -> None:
        self.pool = pool
        self.workers = pool.workers
        self.lost = 0
        self.payloads = payloads
        self.results: dict[int, JobOutcome] = {}
        self.todo = deque(range(len(payloads)))
        self.job_of: dict[WorkerProcess, int] = {}

    def outcomes(self) -> list[JobOutcome]:
        while self.todo or self.job_of:
            while len(self.workers) < min(self.pool.size, len(self.todo) + len(self.job_of)):
                self.workers.append(self.pool.fork_server().fork())
            for worker in list(self.workers):
                if self.todo and worker.pid and worker not in self.job_of:
                    if worker.send(self.payloads[self.todo[0]]):
                        self.job_of[worker] = self.todo.popleft()
                    else:  # it had died while idle: no fault of this job
                        self._end(worker)
            self._collect([worker for worker in self.workers if worker in self.job_of or not worker.pid])
        return [self.results[job] for job in range(len(self.payloads))]

    def _collect(self, waiting: list[WorkerProcess]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker, selectors.EVENT_READ)
            nearest = min((worker.deadline for worker in waiting), default=0.0)
            readable = [key.fileobj for key, _ in selector.select(max(0.0, nearest - time.monotonic()))]
        for worker in waiting:
            if worker in readable:
                self._read(worker)
            elif time.monotonic() >= worker.deadline:
                self._expire(worker)

    def _read(self, worker: WorkerProcess) -> None:
        message = worker.receive()
        if message is None:
            return  # half a frame
        if "bug" in message:
            raise VerifierError(f"the verifier {self.pool.handler} raised:\n{message['bug']}")
        if "ready" in message:
            worker.pid = message["ready"]
        elif "lost" in message and self.lost < _MOST_LOST and (self.lost or self.pool.pids):
            self.lost += 1  # somebody killed the fork server, whose imports had worked: another worker does its job
            if worker in self.job_of:
                self.todo.appendleft(self.job_of.pop(worker))
            self._end(worker)
        elif not worker.pid:
            raise VerifierError(f"a worker of {self.pool.handler} ended before it was ready: {message}")
        elif "ok" in message:
            self._finish(worker, "ok", message["ok"], "")
            if message["rss"] > self.pool.limits.memory_bytes // 2:
                self._end(worker)  # its caches have grown; the next, innocent job must not pay for them
        else:
            status: Literal["timeout", "crash"] = "timeout" if "timeout" in message else "crash"
            self._finish(worker, status, None, message.get(status) or message["lost"])
            self._end(worker)

    def _expire(self, worker: WorkerProcess) -> None:
        limits = self.pool.limits
        if not worker.pid:
            seconds = f"{limits.startup_seconds} s (Limits.startup_seconds)"
            raise VerifierError(f"a worker of {self.pool.handler} was not ready after {seconds}")
        self._finish(worker, "timeout", None, f"no result within {limits.wall_seconds:g} s")
        self._end(worker)

    def _finish(self, worker: WorkerProcess, status: Literal["ok", "timeout", "crash"], value: Any, why: str) -> None:
        self.results[self.job_of.pop(worker)] = JobOutcome(status, value, why, time.monotonic() - worker.since)

    def _end(self, worker: WorkerProcess) -> None:
        worker.kill()
        self.workers.remove(worker)
        self.pool.replaced += 1
