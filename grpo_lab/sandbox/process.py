"""Worker processes and the one that forks them, seen from the trainer: start, send a job, receive a reply, kill."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from grpo_lab.sandbox.worker import encode_frame, take_frame

_BOOT = (
    "import json, sys; spec = json.loads(sys.argv[1]); sys.path[:] = spec['path']; "
    "from grpo_lab.sandbox.nursery import main; main(*spec['args'])"
)
# What a worker sees of the environment. Tokens and keys of the training run are not among it; a fixed hash seed makes
# sympy's orderings, and with them the verdicts, the same in every process.
_INHERITED = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "TMPDIR",
    "COVERAGE_PROCESS_START",
)
_ANSWER_SECONDS = 10.0  # for a kill: the process asked does nothing else
_FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class VerifierError(RuntimeError):
    """A bug in a verifier or a worker that cannot start: ours to fix, never the model's fault."""


@dataclass(frozen=True)
class Limits:
    """What one job, and one worker, may use up.

    `cpu_seconds` is what normally ends a runaway job: processor time, enforced by the kernel, so that a busy machine
    does not turn right answers into timeouts. `wall_seconds` is the hard end in any case (a job that sleeps or starves).
    `memory_bytes`: address space of a worker. `startup_seconds`: wall clock for its imports.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 30.0
    memory_bytes: int = 1 << 30
    startup_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "startup_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if self.memory_bytes < 1 << 28:
            raise ValueError(
                f"memory_bytes must be at least 2**28, what a worker's imports need; got {self.memory_bytes}"
            )


class NurseryProcess:
    """The child that imports the handler and forks the workers (`nursery.main`). Starting it takes milliseconds; its imports go on."""

    def __init__(self, handler: str, limits: Limits) -> None:
        self._handler, self._limits = handler, limits
        self._control, theirs = socket.socketpair()
        self._count, self._buffer = 0, bytearray()
        with theirs:
            longest = 2.0 * limits.wall_seconds + 10.0
            args = [theirs.fileno(), os.getpid(), handler, limits.memory_bytes, limits.cpu_seconds, longest]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps({"path": sys.path, "args": args})],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _INHERITED if name in os.environ} | _FIXED,
                start_new_session=True,  # Ctrl-C in the trainer's terminal is the trainer's to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> WorkerProcess:
        """A new worker, ready as soon as the imports are done. `VerifierError` where this process is no more."""
        self._count += 1
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [encode_frame({"fork": self._count})], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise VerifierError(
                    f"the process that starts workers of {self._handler} has ended with code {self._process.poll()}"
                ) from error
        return WorkerProcess(self, self._count, ours, self._limits)

    def kill(self, number: int) -> None:
        """End that worker, its process group with it, and wait until they are gone."""
        try:
            self._control.settimeout(_ANSWER_SECONDS)
            self._control.sendall(encode_frame({"kill": number}))
            while (answer := take_frame(self._buffer)) is None or answer["gone"] != number:
                chunk = self._control.recv(1 << 12)
                if not chunk:
                    return  # it has ended, and its workers with it
                self._buffer += chunk
        except OSError:
            self.end(at_once=True)

    def end(self, at_once: bool = False) -> None:
        """End it and all workers, and reap it. `at_once`: do not wait for its imports."""
        with contextlib.suppress(OSError):
            self._control.shutdown(
                socket.SHUT_RDWR
            )  # `close` alone says nothing while a fork of the trainer has it too
        self._control.close()
        try:
            if not at_once:
                self._process.wait(_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class WorkerProcess:
    """One worker. `ready` becomes true once it has said hello (`pid` is known then); `deadline` is monotonic seconds."""

    def __init__(self, nursery: NurseryProcess, number: int, channel: socket.socket, limits: Limits) -> None:
        self._nursery, self._number, self._channel, self._limits = nursery, number, channel, limits
        self._buffer = bytearray()
        self._since = time.monotonic()
        self.pid: int | None = None
        self.deadline = self._since + limits.startup_seconds

    @property
    def ready(self) -> bool:
        return self.pid is not None

    def fileno(self) -> int:
        return self._channel.fileno()

    def seconds_on_job(self) -> float:
        return time.monotonic() - self._since

    def send(self, payload: Any) -> bool:
        """Hand over a job and start its clock; False when the process is no longer there to take it."""
        if select.select([self], [], [], 0)[0]:
            return False  # nobody has asked it anything, so this is how it ended
        self._since = time.monotonic()
        self.deadline = self._since + self._limits.wall_seconds
        self._channel.settimeout(self._limits.wall_seconds)
        try:
            self._channel.sendall(encode_frame({"job": payload}))
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Call when readable. The reply, or None while it is incomplete; an end is a `crash` or `timeout`, or `lost`."""
        try:
            chunk = self._channel.recv(1 << 16)
        except OSError:
            chunk = b""
        self._buffer += chunk
        message = take_frame(self._buffer)
        if message is not None:
            return self._how_it_ended(message["ended"]) if "ended" in message else dict(message)
        if chunk:
            return None
        return (
            {"crash": "it ended within a reply"} if self._buffer else {"lost": "ended with the process that started it"}
        )

    def _how_it_ended(self, code: int) -> dict[str, Any]:
        if code == -signal.SIGPROF:
            return {"timeout": f"used up {self._limits.cpu_seconds:g} s of processor time"}
        if code < 0:
            return {"crash": f"the process was ended by {signal.Signals(-code).name}"}
        return {"crash": f"the process ended with exit code {code}"}

    def kill(self) -> None:
        """End the process group now: no zombie stays."""
        self._nursery.kill(self._number)
        self._channel.close()
