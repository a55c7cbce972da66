"""One worker process seen from the trainer: start, send a job, receive a reply, kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from grpo_lab.verifiers.worker import encode_frame, take_frame

_BOOT = (
    "import json, sys; spec = json.loads(sys.argv[1]); sys.path[:] = spec['path']; "
    "from grpo_lab.verifiers.worker import main; main(*spec['args'])"
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


class WorkerProcess:
    """A child that runs `worker.main`. `ready` becomes true once it has said hello; `deadline` is monotonic seconds."""

    def __init__(self, handler: str, limits: Limits) -> None:
        self._limits = limits
        self._channel, theirs = socket.socketpair()
        with theirs:
            args = [theirs.fileno(), handler, limits.memory_bytes, limits.cpu_seconds, 2.0 * limits.wall_seconds + 10.0]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps({"path": sys.path, "args": args})],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _INHERITED if name in os.environ} | _FIXED,
                start_new_session=True,  # Ctrl-C in the trainer's terminal is the trainer's to handle
            )
        self._buffer = bytearray()
        self._since = time.monotonic()
        self.ready = False
        self.deadline = self._since + limits.startup_seconds

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    def seconds_on_job(self) -> float:
        return time.monotonic() - self._since

    def send(self, payload: Any) -> bool:
        """Hand over a job and start its clock; False when the process is no longer there to take it."""
        self._since = time.monotonic()
        self.deadline = self._since + self._limits.wall_seconds
        self._channel.settimeout(self._limits.wall_seconds)
        try:
            self._channel.sendall(encode_frame({"job": payload}))
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Call when readable. The reply, or None while it is incomplete; a process that ended is a `crash` or `timeout`."""
        try:
            chunk = self._channel.recv(1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            return self._how_it_ended()
        self._buffer += chunk
        message = take_frame(self._buffer)
        return None if message is None else dict(message)

    def _how_it_ended(self) -> dict[str, Any]:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return {"crash": "the process closed its connection"}
        if code == -signal.SIGPROF:
            return {"timeout": f"used up {self._limits.cpu_seconds:g} s of processor time"}
        if code < 0:
            return {"crash": f"the process was ended by {signal.Signals(-code).name}"}
        return {"crash": f"the process ended with exit code {code}"}

    def kill(self) -> None:
        """End the process group now and reap it: no zombie stays."""
        self._channel.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
