"""Fork server, between the trainer and its workers: it imports the handler once and forks workers on request.

A fork takes milliseconds, while a new process would import sympy again. So a worker killed over a hostile answer is
replaced at once. Frames on every socket are those of ``wire``, JSON and never pickle: even a worker that model text has
taken over can only send plain data.

The trainer sends `{"fork": n}` together with the worker's end of a socket pair. It sends `{"kill": n}` and gets
`{"gone": n}` once that worker and its process group have ended. A worker sends `{"ready": pid}` once, then one reply
per job:

    {"ok": value}        the value; with "cost", seconds, if the handler ended the job at a limit
    {"crash": reason}    the text exhausted memory or the stack
    {"killed": reason}   a process that the handler ran was killed from outside
    {"bug": traceback}   the handler raised an exception

Every reply has `"peak"`, the worker's peak memory in bytes. The last frame on a worker's socket says how it ended,
`{"ended": code, "peak": bytes}`; the fork server keeps a copy of the socket to send it.

The trainer has ended if the control socket closes, or if this process gets another parent (a fork of the trainer may
hold the socket open). All workers are then killed, whatever they are doing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lab.sandbox.kernel import die_with_parent
from grpo_lab.sandbox.wire import HEADER, frame

Handler = Callable[[Any], Any]
FROM_OUTSIDE = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM})
"""Signals that none of a worker's own limits sends. They come from the kernel when memory runs out, or from somebody
else."""
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class AtLimit:
    """Return value of a handler that ended a job at a limit of its own: the job's value, and its cost in seconds."""

    value: Any
    seconds: float


class KilledFromOutside(Exception):
    """Raised by a handler if a process that it ran was killed by neither the handler nor a limit. ``greedy``: the
    process had used much of its allowed memory (``took_much``)."""

    def __init__(self, reason: str, greedy: bool) -> None:
        super().__init__(reason)
        self.greedy = greedy


def peak_bytes(usage: resource.struct_rusage) -> int:
    """Return the largest resident memory of a process, in bytes."""
    return usage.ru_maxrss * _MAXRSS_UNIT


def took_much(peak: int, memory_bytes: int) -> bool:
    """Return whether a process held so much of its limit (more than half, and 128 MiB) that a lack of memory is its own
    doing."""
    return peak > max(memory_bytes // 2, 1 << 27)


def take_frame(buffer: bytearray) -> Any | None:
    """Remove the first whole frame from `buffer` and return its message; return None if it is incomplete."""
    if len(buffer) < HEADER.size:
        return None
    end = HEADER.size + HEADER.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    body = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return json.loads(body)


def _answer(handler: Handler, payload: Any) -> tuple[dict[str, Any], bool]:
    """Call the handler. Return the reply to the job, and whether the process may take another one: not after memory ran
    out."""
    try:
        value = handler(payload)
        if isinstance(value, AtLimit):
            return {"ok": value.value, "cost": value.seconds}, True
        return {"ok": value}, True
    except KilledFromOutside as error:
        return {"killed": str(error), "greedy": error.greedy}, True
    except MemoryError:
        return {"crash": "memory limit reached"}, False
    except RecursionError:
        return {"crash": "recursion limit reached"}, True
    except Exception:
        return {"bug": traceback.format_exc()}, True


def _serve(channel: socket.socket, handler: Handler, memory_bytes: int, cpu_s: float, self_destruct_s: float) -> None:
    """Run a worker: lower its limits, report that it is ready, and answer jobs until the socket closes.

    Args:
        channel: the socket to the trainer.
        memory_bytes: address space of this process.
        cpu_s: processor seconds of a job with its full share.
        self_destruct_s: seconds on the clock after which a job ends this process even if no trainer is left to do it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    channel.sendall(frame({"ready": os.getpid()}))
    buffer = bytearray()
    healthy = True
    while healthy:
        message = take_frame(buffer)
        if message is None:
            chunk = channel.recv(1 << 16)
            if not chunk:
                return  # the trainer is gone
            buffer += chunk
            continue
        # The kernel ends this process when either timer runs out, even within C code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s * message["share"])
        signal.setitimer(signal.ITIMER_REAL, self_destruct_s)
        reply, healthy = _answer(handler, message["job"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        peak = peak_bytes(resource.getrusage(resource.RUSAGE_SELF))
        channel.sendall(frame({**reply, "peak": peak}, most=None))


class ForkServer:
    """Forks workers on request, reports how they ended, kills them.

    Args:
        control: socket to the trainer.
        handler: function that the workers run; None if it could not be imported.
        bug: traceback of that import; each worker that is asked for answers with it.
        limits: ``memory_bytes``, ``cpu_s`` and ``self_destruct_s`` of a worker (``_serve``).
    """

    def __init__(
        self, control: socket.socket, handler: Handler | None, bug: str, limits: tuple[int, float, float]
    ) -> None:
        self._control = control
        self._handler = handler
        self._bug = bug
        self._limits = limits
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        self._descriptors: deque[int] = deque()  # received with the requests, in order
        self._buffer = bytearray()
        self._pid = os.getpid()
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)

    def run(self, trainer: int) -> None:
        """Serve until the control socket closes or the process ``trainer`` is no longer the parent; then kill all
        workers."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        try:
            while os.getppid() == trainer:
                readable, _, _ = select.select([self._control, self._woken], [], [], 0.5)
                if self._woken in readable:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(1 << 12)
                self._reap()
                if self._control in readable and not self._receive():
                    return
        finally:
            for number in list(self._workers):
                self._kill(number)

    def _reap(self) -> None:
        """Reap the workers that have ended, and report on their sockets how."""
        for number, (pid, channel) in list(self._workers.items()):
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if not ended:
                continue
            del self._workers[number]
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what it has forked
            with channel, contextlib.suppress(OSError):
                channel.setblocking(False)
                code = os.waitstatus_to_exitcode(status)
                channel.send(frame({"ended": code, "peak": peak_bytes(usage)}))

    def _receive(self) -> bool:
        """Read and carry out requests; return False once the socket is closed."""
        chunk, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
        self._descriptors.extend(descriptors)
        self._buffer += chunk
        while (request := take_frame(self._buffer)) is not None:
            if "fork" in request:
                self._fork(request["fork"], socket.socket(fileno=self._descriptors.popleft()))
            else:
                self._kill(request["kill"])
                self._control.sendall(frame({"gone": request["kill"]}))
        return bool(chunk)

    def _fork(self, number: int, channel: socket.socket) -> None:
        """Fork worker ``number``, which talks over ``channel``. Without a handler answer there with the bug instead."""
        if self._handler is None:
            with contextlib.suppress(OSError), channel:
                channel.sendall(frame({"bug": self._bug}))
            return
        pid = os.fork()
        if pid == 0:
            try:  # its own session, no descriptor but its channel; it dies with this process
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                siblings = (sibling for _, sibling in self._workers.values())
                for other in (self._control, self._woken, self._wakes, *siblings):
                    other.close()
                die_with_parent(signal.SIGKILL)
                if os.getppid() != self._pid:
                    os._exit(1)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer went away
                    _serve(channel, self._handler, *self._limits)
            finally:
                os._exit(0)  # no code of the parent may run in the fork
        self._workers[number] = (pid, channel)

    def _kill(self, number: int) -> None:
        """Kill a worker and its process group. Do nothing if it has been reaped: its pid may be another process's."""
        if number in self._workers:
            pid, channel = self._workers.pop(number)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)  # before its `setsid`
            os.waitpid(pid, 0)
            channel.close()


def main(fd: int, trainer: int, handler_name: str, memory_bytes: int, cpu_s: float, self_destruct_s: float) -> None:
    """Entry point of the process: import the handler, then fork workers on request until the trainer has ended.

    Args:
        fd: descriptor of the control socket.
        trainer: pid of the trainer.
        handler_name: ``module:function``, or ``module:function:argument``, where ``function(argument)`` returns the
            handler.
        memory_bytes: address space of a worker.
        cpu_s: processor seconds of a job.
        self_destruct_s: seconds on the clock after which a job ends its worker even without a trainer.
    """
    for deadly in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(deadly, signal.SIG_DFL)
    control = socket.socket(fileno=fd)
    handler = None
    bug = ""
    try:
        name, function, *argument = handler_name.split(":", 2)
        module = importlib.import_module(name)
        getattr(module, "prepare_worker", gc.collect)()
        found = getattr(module, function)
        handler = found(*argument) if argument else found
    except Exception:
        bug = traceback.format_exc()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all of what was imported
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        ForkServer(control, handler, bug, (memory_bytes, cpu_s, self_destruct_s)).run(trainer)
