"""A pool of killable worker processes: hard time limit per job, memory limit per worker, no lost jobs.

``WorkerPool.run`` makes a ``_Round``, which hands each payload to a free worker (``workers.WorkerProcess``), waits for
replies and deadlines, and returns one ``JobOutcome`` per payload.

Why processes and not `signal.alarm` or threads: sympy can spend minutes in one C call (`9**9**9**9`), which neither a
signal handler nor a thread can interrupt. And TRL may call a reward from a thread, where signals do not work at all.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_lab.io import own_cores
from grpo_lab.sandbox.workers import ForkServerProcess, Limits, VerifierError, WorkerProcess

_LOG = logging.getLogger("grpo_lab")
_MOST_LOST = 8  # workers of one round that may end from outside


_Status = Literal["ok", "timeout", "crash", "unjudged"]


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of one job.

    Attributes:
        status: `ok`: the handler returned. `timeout` and `crash`: the job's own fault. `unjudged`: its process was
            killed from outside twice, or the batch had no time left.
        value: what the handler returned; None unless the status is `ok`.
        reason: why there is no value; empty if the status is `ok`.
        seconds: wall-clock seconds from sending the job to its end; 0 if it was never sent.
    """

    status: _Status
    value: Any
    reason: str
    seconds: float


def _close_all(workers: list[WorkerProcess], servers: list[ForkServerProcess], owner_pid: int) -> None:
    """End the workers and their fork server. Do nothing in a fork of the process that started them."""
    if os.getpid() == owner_pid:
        for server in servers:
            server.end(at_once=not any(worker.pid for worker in workers))
    workers.clear()
    servers.clear()


class WorkerPool:
    """`size` processes that run `handler` on JSON payloads.

    Args:
        handler: `"package.module:function"`, imported in the child; `function(payload) -> JSON value`. It returns a
            value for bad model text, too; an exception is a bug and is raised here as `VerifierError`. If its module
            has a function `prepare_worker`, that is called once, before any fork.
        limits: processor time and wall clock per job, bytes per worker.
        size: number of processes; None takes half of the cores that this process may use, between 1 and 4.

    Workers are forks of one process that has imported the handler; it starts on first need, or with `warm_up`. The pool
    may be called from any thread (calls take turns) and survives pickling and forking (the copy starts its own
    processes). It leaves no process behind at exit, at garbage collection, or when its own process is killed (-9 too).
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
        self._servers: list[ForkServerProcess] = []  # at most one; like the workers, it must not outlive the pool
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
        if self._servers:
            return self._servers[0].process.pid
        return None

    def warm_up(self) -> None:
        """Start importing the handler in another process and return at once, so that the first job need not wait."""
        self._own()
        if self._lock.acquire(blocking=False):  # else a round is running
            try:
                self.fork_server()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End all workers. The pool may be used again afterwards."""
        _close_all(self.workers, self._servers, self._pid)

    def _own(self) -> None:
        """Begin anew in a fork: the parent's processes and its lock, which may be held, are not the fork's."""
        if self._pid != os.getpid():
            self._reset()

    def fork_server(self) -> ForkServerProcess:
        """Return the running fork server; start one if there is none."""
        if not self._servers or self._servers[0].process.poll() is not None:
            self._servers[:] = [ForkServerProcess(self.handler, self.limits)]
        return self._servers[0]

    def run(self, payloads: Sequence[Any]) -> list[JobOutcome]:
        """Run every payload; return the outcomes in the same order. Raises `VerifierError` on a bug in the handler."""
        self._own()
        with self._lock:
            try:
                return _Round(self, payloads).outcomes()
            except BaseException:
                self.close()  # a half-finished round must not answer the next one
                raise


class Patience:
    """The time that a batch may lose to jobs that end at their limit.

    It is ``batch_seconds`` of the limits, for each worker and each thousand jobs begun. After half of it, each further
    job gets a tenth of its time limits, so that honest ones are still judged. After all of it, no further job begins.
    A job counts by the limit that ended it, in processor seconds or seconds on the clock, so that a busy machine loses
    no more than an idle one.
    """

    def __init__(self, limits: Limits, workers: int, jobs: int) -> None:
        self._allowed = limits.batch_seconds * workers * math.ceil(jobs / 1000)
        self.lost = 0.0

    @property
    def over(self) -> bool:
        return self.lost >= self._allowed

    @property
    def share(self) -> float:
        """Return the share of its time limits that the next job gets, 1 or 0.1."""
        if self.lost >= self._allowed / 2:
            return 0.1
        return 1.0

    def __str__(self) -> str:
        return f"{self.lost:.3g} s of this batch went to answers that end at their limit (`batch_s`)"


class _Round:
    """The work of one call of ``WorkerPool.run``. Payloads are known by their index.

        todo ──▶ at a worker (``job_of``) ──▶ ``results``
                  │
                  └─ its process was killed from outside ──▶ ``again``: once more, alone, after all others

    Attributes:
        lost: how many workers lost their fork server, or ended before they were ready.
        killed: jobs whose process was killed once.
    """

    def __init__(self, pool: WorkerPool, payloads: Sequence[Any]) -> None:
        self.pool = pool
        self.workers = pool.workers
        self.lost = 0
        self.payloads = payloads
        self.results: dict[int, JobOutcome] = {}
        self.todo = deque(range(len(payloads)))
        self.job_of: dict[WorkerProcess, int] = {}
        self.killed: set[int] = set()
        self.again: deque[int] = deque()
        self.patience = Patience(pool.limits, pool.size, len(payloads))

    def outcomes(self) -> list[JobOutcome]:
        """Run all jobs and return their outcomes, in the order of the payloads."""
        while self.todo or self.again or self.job_of:
            self._choose()
            while len(self.workers) < min(self.pool.size, len(self.todo) + len(self.job_of)):
                self.workers.append(self.pool.fork_server().fork())
            for worker in list(self.workers):
                if self.todo and worker.pid and worker not in self.job_of:
                    if worker.send(self.payloads[self.todo[0]], self.patience.share):
                        self.job_of[worker] = self.todo.popleft()
                    else:  # it had died while idle: no fault of this job
                        self._end(worker)
            self._collect([worker for worker in self.workers if worker in self.job_of or not worker.pid])
        found = [self.results[job] for job in range(len(self.payloads))]
        if unjudged := [one.reason for one in found if one.status == "unjudged"]:
            _LOG.warning("%d of %d answers were not judged: %s", len(unjudged), len(found), unjudged[-1])
        return found

    def _choose(self) -> None:
        """Choose the next jobs: none if the batch has lost its time. A job whose process was killed comes last and
        alone, when no other job of the batch takes its memory."""
        if self.patience.over:
            for job in (*self.todo, *self.again):
                self.results[job] = JobOutcome("unjudged", None, str(self.patience), 0.0)
            self.todo.clear()
            self.again.clear()
        if self.again and not (self.todo or self.job_of):
            self.todo.append(self.again.popleft())

    def _collect(self, waiting: list[WorkerProcess]) -> None:
        """Wait until a worker has said something or the nearest deadline has passed, and handle both."""
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
        """Handle the next message of a worker (``WorkerProcess.receive``)."""
        message = worker.receive()
        if message is None:
            return  # half a frame
        if "bug" in message:
            raise VerifierError(f"the verifier {self.pool.handler} raised:\n{message['bug']}")
        if "ready" in message:
            worker.pid = message["ready"]
        elif "lost" in message or not worker.pid:
            self._lose(worker, message)
        elif "killed" in message:
            self._judge_again(worker, message["killed"], message["greedy"])
        elif "ok" in message:
            self.patience.lost += message.get("cost", 0.0)
            self._finish(worker, "ok", message["ok"], "")
            if message["peak"] > self.pool.limits.memory_bytes // 2:
                self._end(worker)  # its caches have grown; the next, innocent job must not pay for them
        elif "timeout" in message:
            self._run_out(worker, self.pool.limits.cpu_seconds, message["timeout"])
        else:
            self._finish(worker, "crash", None, message["crash"])
            self._end(worker)

    def _lose(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Give the job of a worker back after the fork server ended, or the worker before it was ready.

        After more than `_MOST_LOST` such ends in this round the job is `unjudged`. Raises `VerifierError` if the worker
        had no job then, or if the imports are the cause: a process ended by itself and no worker was ever ready.
        """
        if "lost" in message:
            how = worker.server.ended()
        else:
            how = message.get("crash", "")
        self.lost += 1
        imports_failed = bool(how) and not self.pool.pids
        if not imports_failed and self.lost <= _MOST_LOST:
            if worker in self.job_of:
                self.todo.appendleft(self.job_of.pop(worker))
        elif worker in self.job_of:
            self._finish(worker, "unjudged", None, f"{self.lost} times its fork server was ended from outside")
        else:
            why = how or f"was ended from outside, {self.lost} times"
            raise VerifierError(f"a process of the verifier {self.pool.handler} {why} before it was ready")
        self._end(worker)

    def _judge_again(self, worker: WorkerProcess, why: str, greedy: bool) -> None:
        """Queue a job again whose process was ended by neither the job nor a limit. The second time it is `unjudged`,
        or a `crash` if the process held much of its allowed memory (`greedy`)."""
        job = self.job_of[worker]
        if job not in self.killed:
            self.killed.add(job)
            self.again.append(self.job_of.pop(worker))
        else:
            self._finish(worker, "crash" if greedy else "unjudged", None, f"{why}, twice")
        self._end(worker)

    def _expire(self, worker: WorkerProcess) -> None:
        """End the job of a worker whose deadline has passed. Raises `VerifierError` if it never became ready."""
        limits = self.pool.limits
        if not worker.pid:
            seconds = f"{limits.startup_seconds} s (Limits.startup_seconds)"
            raise VerifierError(f"a worker of {self.pool.handler} was not ready after {seconds}")
        self._run_out(worker, limits.wall_seconds, f"no result within {limits.wall_seconds * worker.share:g} s")

    def _run_out(self, worker: WorkerProcess, seconds: float, why: str) -> None:
        """End a job that has used up its share of ``seconds``. It is a `timeout` only if that share was all of them."""
        self.patience.lost += seconds * worker.share
        if worker.share < 1.0:
            self._finish(worker, "unjudged", None, f"{why}; {self.patience}")
        else:
            self._finish(worker, "timeout", None, why)
        self._end(worker)

    def _finish(self, worker: WorkerProcess, status: _Status, value: Any, why: str) -> None:
        self.results[self.job_of.pop(worker)] = JobOutcome(status, value, why, time.monotonic() - worker.since)

    def _end(self, worker: WorkerProcess) -> None:
        worker.kill()
        self.workers.remove(worker)
        self.pool.replaced += 1
