"""Another process that writes into a folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HOLDS = """
import sys
from pathlib import Path
from grpo_lab.runs.folder import one_writer
with one_writer(Path(sys.argv[1]), *sys.argv[2:]):
    print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holding() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that holds the lock of a folder (or another lock in it, by its name) until the test ends."""
    with contextlib.ExitStack() as started:

        def hold(folder: Path, *name: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", HOLDS, str(folder), *name]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            started.enter_context(process)
            started.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "has it\n"
            return process

        yield hold
