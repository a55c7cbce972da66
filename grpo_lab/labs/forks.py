"""Processes for the cells of a lab, as forks of one that has imported what cells need.

Importing TRL takes nine seconds of a core where vLLM is installed, and a cell of a large lab may take no longer than
that. `CellForks` starts a process that imports once and forks for each cell. The fork then runs the lab's own program
as a new process would: with its arguments and folder, with all that it prints in the cell's log, and with the exit code
of a program.

    python -m grpo_lab.labs.forks MODULE...     what `CellForks` starts

It reads a line of JSON for each cell from its stdin, and writes the cell's exit code to its stdout.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_lab.sandbox.kernel import die_with_parent
from grpo_lab.signals import handle, put_back

LOCKED = 73
"""Exit code of a cell whose log another process has locked."""


class CellForks:
    """A process that has imported ``modules`` and forks for one cell at a time. It ends when this process does, or the
    block ``with CellForks(...)``."""

    def __init__(self, modules: Sequence[str]) -> None:
        command = [sys.executable, "-m", __name__, *modules]
        how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen(command, preexec_fn=partial(die_with_parent, signal.SIGTERM), **how)

    def run(self, program: Sequence[str], words: Sequence[str], log: Path) -> int:
        """Run a program to its end in a fork.

        Args:
            program: a script's path, or ``-m`` and a module.
            words: its arguments.
            log: the file to which all that it prints is appended; it is locked as long as the program runs.

        Returns:
            The program's exit code, or `LOCKED` if another process holds the lock of ``log``.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        asked = {"program": [*program], "words": [*words], "log": str(log)}
        self._server.stdin.write(f"{json.dumps(asked)}\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            return self._server.wait() or 1
        return int(answer)

    def __enter__(self) -> CellForks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def serve(modules: Sequence[str]) -> None:
    """Import ``modules``. Then fork for each line of stdin, wait for the fork, and print its exit code.

    Ctrl-C reaches every process of a terminal: it ends the running cell, and this process forks for no other.
    """
    stopped: list[int] = []
    handle(lambda number, frame: stopped.append(number), signal.SIGINT)
    for module in modules:
        import_module(module)
    gc.freeze()  # the forks collect their own garbage, not what was imported
    for line in sys.stdin:
        if stopped:
            return
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            become(asked["program"], asked["words"], Path(asked["log"]))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(program: Sequence[str], words: Sequence[str], log: Path) -> None:
    """Run a program in this fork, as its main module, with its output in ``log``. The fork ends with the program, or
    with exit code `LOCKED`."""
    die_with_parent(signal.SIGTERM)
    put_back({signal.SIGINT: signal.default_int_handler})
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(LOCKED)
    except OSError:
        pass  # the file system has no locks
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [program[-1], *words]
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1:])
