"""Who has a server: the same process, another that lives, one that is dead, one that cannot be seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from grpo_lab.engines.vllm.worker import PATIENCE, lives, place, same_run, started_at, this_run

pytestmark = pytest.mark.skipif(not place(), reason="needs /proc")


def test_this_process_lives_and_is_itself() -> None:
    owner = this_run("runs/x")
    assert owner["pid"] == os.getpid()
    assert same_run(owner, this_run("runs/y"))
    assert lives(owner, last_sign=-1e9)  # seen, so its silence does not matter


def test_a_process_that_ended_is_dead_and_a_number_used_again_is_another() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    owner = {**this_run("runs/x"), "pid": ended.pid, "started": started_at(ended.pid)}
    ended.wait()
    assert not lives(owner, last_sign=time.monotonic())
    reused = {**this_run("runs/x"), "started": "1"}
    assert not lives(reused, last_sign=time.monotonic())
    assert not same_run(reused, this_run("runs/x"))


def test_a_zombie_is_dead() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    while started_at(ended.pid):
        time.sleep(0.01)
    assert started_at(ended.pid) == ""  # not waited for yet
    ended.wait()


def test_a_process_elsewhere_is_believed_for_a_while() -> None:
    owner = {**this_run("runs/x"), "place": "another machine"}
    assert lives(owner, last_sign=time.monotonic() - PATIENCE + 5)
    assert not lives(owner, last_sign=time.monotonic() - PATIENCE - 5)
