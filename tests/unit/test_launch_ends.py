"""A launch that fails leaves no process behind, in a session of its own neither."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from distributed.launch import end_with_children

CHILD = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True).pid, flush=True); time.sleep(60)"


def test_a_child_in_a_session_of_its_own_ends_too() -> None:
    started = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout is not None
    child = int(started.stdout.readline())
    end_with_children(started.pid)
    started.communicate()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlives its launcher"
        time.sleep(0.05)
