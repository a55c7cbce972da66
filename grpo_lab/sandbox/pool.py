"""A pool of killable worker processes: hard time limit per job, memory limit per worker, no lost jobs.

Why processes and not `signal.alarm` or threads: sympy can sit for minutes inside one C call (`9**9**9**9`), where
neither a Python signal handler nor a thread can reach it; and TRL may call a reward from a thread, where signals do
not work at all. A process can always be killed.

Why our own `Popen` and not `multiprocessing` spawn: spawn runs the caller's `__main__` again in every child, so a
training script without a `__name__` guard would start a second training there.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_lab.io import own_cores
from grpo_lab.sandbox.process import Limits, NurseryProcess, VerifierError, WorkerProcess

_MOST_LOST = 8  # workers of one round whose end was nobody's fault
__all__ = ["Limits", "Outcome", "VerifierError", "WorkerPool"]


@dataclass(frozen=True)
class Outcome:
    """What became of one job: `ok` with the handler's value, `timeout` or `crash` with a reason; wall-clock seconds."""

    status: Literal["ok", "timeout", "crash"]
    value: Any
    reason: str
    seconds: float


def default_size() -> int:
    """Half of the cores this process may use, between 1 and 4 (several ranks share a machine)."""
    return min(4, max(1, own_cores() // 2))


@dataclass
class _Processes:
    """What must not outlive the pool."""

    workers: list[WorkerProcess] = field(default_factory=list)
    nursery: NurseryProcess | None = None


def _close_all(processes: _Processes, owner_pid: int) -> None:
    """End the processes, unless this is a fork of the owner: they are not ours to end there."""
    if os.getpid() == owner_pid and processes.nursery is not None:
        processes.nursery.end(at_once=not any(worker.ready for worker in processes.workers))
    processes.workers.clear()
    processes.nursery = None


class WorkerPool:
    """`size` processes that run `handler` on JSON payloads.

    Args:
        handler: `"package.module:function"`, imported in the child; `function(payload) -> JSON value`. It turns bad
            model text into a value of its own; an exception out of it is a bug and is raised here as `VerifierError`.
        limits: processor time and wall clock per job, bytes per worker.
        size: number of processes; None: `default_size()`.

    Workers are forks of one process that has imported the handler; it starts on first need, or with `warm_up`. The object may
    be called from any thread (calls take turns), survives pickling and forking (the copy starts processes of its own), and
    leaves no process behind at exit, at garbage collection, or when its own process is killed (-9 too).
    """

    def __init__(self, handler: str, *, limits: Limits | None = None, size: int | None = None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"size must be at least 1 process, or None for a default; got {size}")
        if handler.count(":") != 1:
            raise ValueError(f"handler must look like 'package.module:function'; got {handler!r}")
        self.handler = handler
        self.limits = limits or Limits()
        self.size = size or default_size()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._processes = _Processes()
        self._finalizer = weakref.finalize(self, _close_all, self._processes, self._pid)
        self.replaced = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"handler": self.handler, "limits": self.limits, "size": self.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are alive now."""
        return [worker.pid for worker in self._processes.workers if worker.pid is not None]

    @property
    def nursery_pid(self) -> int | None:
        """Process id of what forks the workers; None before it is started."""
        nursery = self._processes.nursery
        return None if nursery is None else nursery.pid

    def warm_up(self) -> None:
        """Starts the imports in a process beside this one and returns at once: the first job then finds them done."""
        self._own()
        if self._lock.acquire(blocking=False):  # else a round is at it
            try:
                self._nursery()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End all workers. The pool may be used again afterwards."""
        _close_all(self._processes, self._pid)

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._reset()  # forked: the parent's processes and its lock (perhaps held) are not ours

    def _nursery(self) -> NurseryProcess:
        processes = self._processes
        if processes.nursery is None or not processes.nursery.alive:
            processes.nursery = NurseryProcess(self.handler, self.limits)
        return processes.nursery

    def run(self, payloads: Sequence[Any]) -> list[Outcome]:
        """Runs every payload and returns outcomes in the same order. Raises `VerifierError` on a bug in the handler."""
        self._own()
        with self._lock:
            try:
                return _Round(self, payloads).outcomes()
            except BaseException:
                self.close()  # a half-finished round must not answer the next one
                raise


class _Round:
    """One call of `WorkerPool.run`: who works on what, since when."""

    def __init__(self, pool: WorkerPool, payloads: Sequence[Any]) -> None:
        self.pool = pool
        self.workers = pool._processes.workers
        self.lost = 0
        self.payloads = payloads
        self.results: list[Outcome | None] = [None] * len(payloads)
        self.todo = deque(range(len(payloads)))
        self.job_of: dict[WorkerProcess, int] = {}

    def outcomes(self) -> list[Outcome]:
        while self.todo or self.job_of:
            self._hire()
            self._hand_out()
            self._collect()
        assert all(result is not None for result in self.results)
        return [result for result in self.results if result is not None]

    def _hire(self) -> None:
        wanted = min(self.pool.size, len(self.todo) + len(self.job_of))
        while len(self.workers) < wanted:
            self.workers.append(self.pool._nursery().fork())

    def _hand_out(self) -> None:
        for worker in list(self.workers):
            if self.todo and worker.ready and worker not in self.job_of:
                job = self.todo.popleft()
                if worker.send(self.payloads[job]):
                    self.job_of[worker] = job
                else:  # it had died while idle: no fault of this job
                    self.todo.appendleft(job)
                    self._dismiss(worker)

    def _collect(self) -> None:
        waiting = [worker for worker in self.workers if worker in self.job_of or not worker.ready]
        if not waiting:
            return
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker, selectors.EVENT_READ)
            nearest = min(worker.deadline for worker in waiting)
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
        elif "lost" in message and self.lost < _MOST_LOST and (worker.ready or self.lost):
            self._again(worker)
        elif not worker.ready:
            raise VerifierError(f"a worker of {self.pool.handler} ended before it was ready: {message}")
        elif "ok" in message:
            self._finish(worker, "ok", message["ok"], "")
            if message["rss"] > self.pool.limits.memory_bytes // 2:
                self._dismiss(worker)  # its caches have grown; the next, innocent job must not pay for them
        else:
            status: Literal["timeout", "crash"] = "timeout" if "timeout" in message else "crash"
            self._finish(worker, status, None, message.get(status) or message["lost"])
            self._dismiss(worker)

    def _again(self, worker: WorkerProcess) -> None:
        """Its end had nothing to do with its job (somebody killed the process that forks): another worker does that."""
        self.lost += 1
        if worker in self.job_of:
            self.todo.appendleft(self.job_of.pop(worker))
        self._dismiss(worker)

    def _expire(self, worker: WorkerProcess) -> None:
        if not worker.ready:
            raise VerifierError(
                f"a worker of {self.pool.handler} was not ready after {self.pool.limits.startup_seconds} s "
                "(Limits.startup_seconds)"
            )
        self._finish(worker, "timeout", None, f"no result within {self.pool.limits.wall_seconds:g} s")
        self._dismiss(worker)

    def _finish(self, worker: WorkerProcess, status: Literal["ok", "timeout", "crash"], value: Any, why: str) -> None:
        self.results[self.job_of.pop(worker)] = Outcome(status, value, why, worker.seconds_on_job())

    def _dismiss(self, worker: WorkerProcess) -> None:
        worker.kill()
        self.workers.remove(worker)
        self.pool.replaced += 1
