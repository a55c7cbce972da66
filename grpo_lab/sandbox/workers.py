"""The trainer's side of a pool: the fork server, its workers, and the limits of what they may use up.

Why our own `Popen` and not `multiprocessing` spawn: spawn runs the caller's `__main__` again in every child. A training
script without a `__name__` guard would then start a second training. The other side is `fork_server`.
"""

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

from grpo_lab.sandbox.fork_server import FROM_OUTSIDE, take_frame, took_much
from grpo_lab.sandbox.wire import frame

_BOOT = (
    "import json, sys; spec = json.loads(sys.argv[1]); sys.path[:] = spec['path']; "
    "from grpo_lab.sandbox.fork_server import main; main(*spec['args'])"
)
# What a worker sees of the environment. Tokens and keys of the training run are not among it; a fixed hash seed makes
# sympy's orderings, and with them the verdicts, the same in every process.
_INHERITED = "PATH LANG LC_ALL LD_LIBRARY_PATH PYTHONHOME VIRTUAL_ENV TMPDIR COVERAGE_PROCESS_START"
_FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_ANSWER_SECONDS = 10.0  # for a kill: the fork server does nothing else


class VerifierError(RuntimeError):
    """Raised for a bug in a verifier or a worker that cannot start: ours to fix, never the model's fault."""


@dataclass(frozen=True)
class Limits:
    """Limits of a job, a worker and a batch.

    Attributes:
        cpu_seconds: processor time of a job, enforced by the kernel. A busy machine makes no right answer a timeout.
        wall_seconds: time of a job on the clock, which ends one that sleeps or starves.
        memory_bytes: address space of a worker.
        startup_seconds: time on the clock within which a worker must have imported its handler.
        batch_seconds: seconds that each worker may lose, per thousand jobs of a batch, to jobs that end at their limit
            (`pool.Patience`).
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 30.0
    memory_bytes: int = 1 << 30
    startup_seconds: float = 120.0
    batch_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "startup_seconds", "batch_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if self.memory_bytes < 1 << 28:
            raise ValueError(f"memory_bytes must be at least 2**28, what imports need; got {self.memory_bytes}")


def _how(code: int) -> str:
    """Say how a process with this exit code ended (−n: by signal n)."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class ForkServerProcess:
    """The trainer's handle on its fork server, the child process that imports a handler and forks the workers
    (`fork_server.main`). Starting it does not wait for the imports."""

    def __init__(self, handler: str, limits: Limits) -> None:
        self._limits = limits
        self._control, theirs = socket.socketpair()
        self._count = 0
        self._buffer = bytearray()
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
        """Ask for a new worker and return it at once; it is ready when the imports are done. If the fork server has
        ended, the worker's first message is `lost`."""
        self._count += 1
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [frame({"fork": self._count})], [theirs.fileno()])
        return WorkerProcess(self, self._count, ours, self._limits)

    def ended(self) -> str:
        """Return how the fork server ended, in words; empty if it was killed from outside, or still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets close a moment before it ends
            code = self.process.wait(_ANSWER_SECONDS)
            if -code in FROM_OUTSIDE:
                return ""
            return _how(code)
        return ""

    def kill(self, number: int) -> None:
        """End worker ``number`` and its process group, and wait until they are gone."""
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
        """End the fork server and all workers, and reap it. `at_once`: kill it without waiting for its imports."""
        with contextlib.suppress(OSError):  # `close` alone has no effect while a fork of the trainer has it too
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if at_once else _ANSWER_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class WorkerProcess:
    """The trainer's handle on one worker process.

    Attributes:
        pid: process id; None until the worker has said that it is ready.
        since: when its job was sent, or the worker asked for, in monotonic seconds.
        share: share of a job's time limits that its job got.
        deadline: when it must have answered, in monotonic seconds.
    """

    def __init__(self, server: ForkServerProcess, number: int, channel: socket.socket, limits: Limits) -> None:
        self.server = server
        self._number = number
        self._channel = channel
        self._limits = limits
        self._buffer = bytearray()
        self.since = time.monotonic()
        self.share = 1.0
        self.pid: int | None = None
        self.deadline = self.since + limits.startup_seconds

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, payload: Any, share: float) -> bool:
        """Send a job and start its clock, with ``share`` of a job's time limits. Return False if the worker has
        ended."""
        if select.select([self], [], [], 0)[0]:
            return False  # nothing was asked, so this says that it ended
        self.since = time.monotonic()
        self.share = share
        self.deadline = self.since + self._limits.wall_seconds * share
        self._channel.settimeout(self._limits.wall_seconds)
        try:
            self._channel.sendall(frame({"job": payload, "share": share}, most=None))
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Return the next message of a worker with readable data, None while the message is incomplete.

        Messages are those of `fork_server`. If the process has ended, its exit is turned into `crash`, `timeout`,
        `killed` (from outside, by none of its limits) or `lost` (together with its fork server).
        """
        try:
            chunk = self._channel.recv(1 << 16)
        except OSError:
            chunk = b""
        self._buffer += chunk
        try:
            message = take_frame(self._buffer)
        except ValueError:  # the frame about its end came inside that of its reply
            return {"killed": "the process ended within a reply", "greedy": False}
        if message is None:
            if chunk:
                return None
            if self._buffer:
                return {"killed": "the process ended within a reply", "greedy": False}
            return {"lost": "ended with its fork server"}
        code = message.get("ended")
        if code is None:
            return dict(message)
        if code == -signal.SIGPROF:
            return {"timeout": f"used up {self._limits.cpu_seconds * self.share:g} s of processor time"}
        if -code in FROM_OUTSIDE:
            greedy = took_much(message["peak"], self._limits.memory_bytes)
            return {"killed": f"the process {_how(code)}", "greedy": greedy}
        return {"crash": f"the process {_how(code)}"}

    def kill(self) -> None:
        """End the process group now and reap it, so that no zombie stays."""
        self.server.kill(self._number)
        self._channel.close()
