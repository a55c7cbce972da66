"""A lock ends with the process that holds it, however that ends and whatever it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lab import locks
from grpo_lab.curation import pass_rates
from grpo_lab.runs.folder import LOCK, one_writer

PROBLEMS = [{"prompt": "1 + 1?", "solution": "2"}]
LEAVES_A_CHILD = """
import os, sys
from grpo_lab.curation import pass_rates

def generate(prompts, n):
    if os.fork() == 0:  # as a process that is just being started, before its own program begins
        print("child", os.getpid(), flush=True)
        os.read(0, 1)
        os._exit(0)
    return [["2"] * n for _ in prompts]

def score(prompts, completions, **columns):
    os.kill(os.getpid(), 9)

pass_rates([{"prompt": "1 + 1?", "solution": "2"}], generate, score, n=1, path=sys.argv[1], progress=False)
"""


@pytest.fixture
def holder(tmp_path: Path, holding: Callable[..., subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Another process that writes into ``tmp_path``."""
    return holding(tmp_path)


def test_a_child_that_outlives_a_killed_sampling_holds_nothing(tmp_path: Path) -> None:
    """`rounds`, killed by −9 and begun again at once, said that samples.jsonl is being written by another process: by
    the child that had just been started for the verifiers."""
    file = tmp_path / "samples.jsonl"
    command = [sys.executable, "-c", LEAVES_A_CHILD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        assert process.wait() == -signal.SIGKILL
        os.kill(child, 0)  # it is there
        found = pass_rates(PROBLEMS, lambda prompts, n: [["2"]], lambda **_: [1.0], n=1, path=file, progress=False)
        os.kill(child, signal.SIGKILL)
    assert [one.rate for one in found] == [1.0]


def test_a_holder_that_is_ending_is_waited_for_and_another_is_not(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process keeps its locks until its memory is given back and its last write is on the disk."""
    assert locks.is_locked(tmp_path / LOCK)
    with pytest.raises(ValueError, match=rf"in use: process {holder.pid} on"), one_writer(tmp_path):
        pass

    def ending(process: int) -> bool:
        assert process == holder.pid
        holder.kill()
        return True

    monkeypatch.setattr(locks, "_is_ending", ending)
    with one_writer(tmp_path):
        assert locks.is_locked(tmp_path / LOCK)
    assert not locks.is_locked(tmp_path / LOCK)


def test_who_is_ending(holder: subprocess.Popen[str]) -> None:
    assert not locks._is_ending(os.getpid())
    assert not locks._is_ending(holder.pid)
    assert not locks._is_ending(0)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet put away by its parent
    assert locks._is_ending(holder.pid)
    holder.wait()
    assert locks._is_ending(holder.pid)
