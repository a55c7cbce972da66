"""The process between the trainer and its workers: it imports the handler once, forks workers, and ends them with the trainer.

A fork costs milliseconds where a new process would import sympy again, so that a worker killed over a hostile answer is replaced
at once. Requests come as frames on the control socket: `{"fork": n}`, with the worker's end of a socket pair beside it, and
`{"kill": n}`, answered by `{"gone": n}` when that worker and its process group are no more. The exit code of a worker that
ends by itself is the last frame on its own socket, `{"ended": code}`: this process keeps a copy of it for that.

The trainer is gone when the control socket closes, or when this process has another parent (a fork of the trainer may hold the
socket open). All workers are then killed, whatever they are at.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from typing import Any

from grpo_lab.sandbox.worker import Handler, be_worker, encode_frame, take_frame

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5  # how often the parent is looked at
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Nursery:
    def __init__(
        self, control: socket.socket, handler: Handler | None, bug: str, limits: tuple[int, float, float]
    ) -> None:
        self._control, self._handler, self._bug, self._limits = control, handler, bug, limits
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        self._handed: deque[int] = deque()  # file descriptors that came along, in order
        self._buffer = bytearray()
        self._pid = os.getpid()
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)

    def run(self, trainer: int) -> None:
        """Until the trainer is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        try:
            while os.getppid() == trainer:
                readable, _, _ = select.select([self._control, self._woken], [], [], _LOOK_SECONDS)
                if self._woken in readable:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(1 << 12)
                self._reap()
                if self._control in readable and not self._hear():
                    return
        finally:
            for number in list(self._workers):
                self._kill(number)

    def _hear(self) -> bool:
        """Takes in requests; False at the end of the socket."""
        chunk, handed, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
        self._handed.extend(handed)
        self._buffer += chunk
        while (request := take_frame(self._buffer)) is not None:
            if "fork" in request:
                self._fork(request["fork"], socket.socket(fileno=self._handed.popleft()))
            else:
                self._kill(request["kill"])
                self._control.sendall(encode_frame({"gone": request["kill"]}))
        return bool(chunk)

    def _fork(self, number: int, channel: socket.socket) -> None:
        if self._handler is None:
            with contextlib.suppress(OSError), channel:
                channel.sendall(encode_frame({"bug": self._bug}))
            return
        pid = os.fork()
        if pid == 0:
            try:
                self._leave()
                be_worker(channel, self._handler, *self._limits)
            finally:
                os._exit(0)  # nothing of this process's is to be run again there
        self._workers[number] = (pid, channel)

    def _leave(self) -> None:
        """In the fork: its own session, no descriptor but its channel, and the end of this process is its end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for other in (self._control, self._woken, self._wakes, *(sibling for _, sibling in self._workers.values())):
            other.close()
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._pid:
            os._exit(1)

    def _reap(self) -> None:
        for number, (pid, channel) in list(self._workers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._workers[number]
            with channel, contextlib.suppress(OSError):
                channel.setblocking(False)
                channel.send(encode_frame({"ended": os.waitstatus_to_exitcode(status)}))

    def _kill(self, number: int) -> None:
        """Nothing to do where it has ended and been reaped: its number may be another process's by now."""
        if number not in self._workers:
            return
        pid, channel = self._workers.pop(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)  # before its `setsid`
        os.waitpid(pid, 0)
        channel.close()


def main(fd: int, trainer: int, handler_name: str, memory_bytes: int, cpu_s: float, self_destruct_s: float) -> None:
    """Entry point: import the handler, then fork workers on request until the trainer is gone."""
    for deadly in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(deadly, signal.SIG_DFL)
    control, handler, bug = socket.socket(fileno=fd), None, ""
    try:
        module, function = handler_name.split(":")
        handler = getattr(importlib.import_module(module), function)
    except Exception:
        bug = traceback.format_exc()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all of what was imported
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _Nursery(control, handler, bug, (memory_bytes, cpu_s, self_destruct_s)).run(trainer)
