"""vLLM servers as forks of one process that has imported vLLM: a server costs its model, not the imports of its two
processes (eighteen seconds of a core).

What a fork does not show are faults of the imports themselves: ``test_server_live.py`` starts `grpo-lab serve` from
nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import forked

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
)


def popen(command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes] | None = None, **how: Any) -> Any:
    """``subprocess.Popen`` for `Server`: a fork, where the command is that of a server on a CPU."""
    if MODULES[0] not in command:
        return subprocess.Popen(command, env=env, stdout=stdout, **how)
    output = 1 if stdout is None else stdout.fileno()
    descriptors = [output, *how.get("pass_fds", ())]
    return Fork(_serve, list(command), dict(env), how.get("preexec_fn"), descriptors)


def serve(words: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes]) -> Fork:
    """`grpo-lab serve`, the command too a fork."""
    return Fork(_command, list(words), dict(env), None, [stdout.fileno()])


def forking() -> Any:
    """What stands in for the module `subprocess` where a server is started."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})


class Fork:
    """What is used of ``subprocess.Popen``, for ``become`` in a fork of the process that has imported vLLM."""

    def __init__(self, become: Callable[..., None], *args: Any) -> None:
        *args, descriptors = args
        if process.parent_process() is None:
            started = forked.forks.Process
        else:  # this is such a fork itself
            started = multiprocessing.get_context("fork").Process
        self._fork = started(target=become, args=(*args, _Descriptors(descriptors)), daemon=True)
        with mock.patch.dict(os.environ, PYTHONPATH=forked.PATHS, OMP_NUM_THREADS="1"):
            self._fork.start()  # a daemon: ended at this process's exit
        assert self._fork.pid is not None
        self.pid = self._fork.pid

    def poll(self) -> int | None:
        return self._fork.exitcode

    @property
    def returncode(self) -> int | None:
        return self._fork.exitcode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self._fork.exitcode is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("the server", timeout or 0.0)
            self._fork.join(0.5)  # so that a signal is handled meanwhile
        return self._fork.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._fork.kill()


class _Descriptors(list[int]):
    """Descriptors that a fork has, too; sent to the fork server they get other numbers."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, ([DupFd(one) for one in self],)


def _received(sent: Sequence[Any]) -> _Descriptors:
    return _Descriptors(one.detach() for one in sent)


def _become(command: list[str], environment: dict[str, str], output: int) -> None:
    """This fork as ``python -m MODULE ARGUMENTS…``."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has children
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__")


def _serve(command: list[str], environment: dict[str, str], begin: Any, descriptors: list[int]) -> None:
    """vLLM's server, in a session of its own. The CPU build spawns its engine: here that is a fork, too."""
    os.setsid()
    if begin is not None:
        begin()
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore
    _become(command, environment, descriptors[0])


def _command(command: list[str], environment: dict[str, str], _: None, descriptors: list[int]) -> None:
    """`grpo-lab serve`, which starts its server as a fork of itself."""
    from grpo_lab.engines.vllm import server

    signal.signal(signal.SIGINT, signal.default_int_handler)
    server.subprocess = forking()  # type: ignore[attr-defined]
    _become(command, environment, descriptors[0])
