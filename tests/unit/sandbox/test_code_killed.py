"""``CodeReward`` where somebody outside ends what runs a program: the kernel when memory is short, or a person.

Programs wait for the test, by a file or for ever, so that nothing depends on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_lab.rewards import CodeReward
from grpo_lab.sandbox import client, jail
from grpo_lab.sandbox.walls import Cell

pytestmark = pytest.mark.slow

WAITS = "import os, time\ndef add(a, b):\n    while not os.path.exists({go!r}): time.sleep(0.01)\n    return a + b"
FOR_EVER = "import time\ndef add(a, b): time.sleep(600)"
TESTS = "assert add(1, 2) == 3"
SCRIPT = [["", "3"]]


@pytest.fixture(autouse=True)
def any_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets that root is not given are tried as root, too."""
    monkeypatch.setattr(client, "_is_root", lambda: False)


def made(walls: list[str] | None) -> CodeReward:
    reward = CodeReward(timeout_s=20.0, wall_s=300.0, memory_bytes=1 << 29, workers=1, walls=walls)
    try:
        assert reward.in_force
    except ValueError as error:
        pytest.skip(str(error))
    return reward


def programs(reward: CodeReward) -> dict[int, int]:
    """The processes that run a program, the interpreter that a watcher has started, and the worker of each."""
    found = {}
    for worker in reward._judge.pool.pids:
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(worker).children(recursive=True)
            found |= {one.pid: worker for one in below if "run('" in " ".join(one.cmdline())}
    return found


def workers(reward: CodeReward) -> set[int]:
    """Those that are at a job."""
    return set(programs(reward).values())


@contextlib.contextmanager
def killing(
    find: Callable[[], Iterable[int]], times: int, then: Callable[[], Any] = lambda: None
) -> Iterator[list[int]]:
    """Kills what is found, each process once, so many of them in all."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while len(killed) < times and not over.wait(0.02):
            for pid in find():
                if pid not in killed and len(killed) < times:
                    killed.append(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        then()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def test_a_right_program_that_was_killed_is_judged_again(tmp_path: Path) -> None:
    reward, go = made(["seccomp", "limits"]), tmp_path / "go"
    with killing(lambda: programs(reward), 1, go.touch) as killed:
        assert reward(completions=[WAITS.format(go=str(go))], tests=[TESTS]) == [1.0]
    assert len(killed) == 1
    reward.close()


@pytest.mark.parametrize("walls", [None, ["seccomp", "landlock", "limits"], ["namespaces", "user", "limits"]])
@pytest.mark.parametrize("tests", [TESTS, SCRIPT], ids=["assertions", "a script"])
def test_killed_twice_it_is_none_and_counted(walls: list[str] | None, tests: Any) -> None:
    """Without the filter a program's memory has no bound, so that its end by memory may be its own doing: 0."""
    reward, logged = made(walls), {}
    with killing(lambda: programs(reward), 2) as killed:
        program = FOR_EVER if tests is TESTS else "import time\ntime.sleep(600)"
        paid = reward(completions=[program], tests=[tests], log_metric=logged.__setitem__)
    bounded = walls is None or "seccomp" in walls
    assert paid == ([None] if bounded else [0.0])
    assert len(killed) == 2
    assert logged["code_reward/unjudged"] == float(bounded)
    assert reward.counts == {"unjudged" if bounded else "limit": 1}
    reward.close()


def test_a_worker_that_was_killed_twice() -> None:
    reward = made(None)
    with killing(lambda: workers(reward), 2) as killed:
        assert reward(completions=[FOR_EVER], tests=[TESTS]) == [None]
    assert len(killed) == 2
    reward.close()


def test_where_a_program_may_have_done_it_itself_it_is_0() -> None:
    reward = made(["limits"])
    with killing(lambda: programs(reward), 1):
        assert reward(completions=[FOR_EVER], tests=[TESTS]) == [0.0]
    with killing(lambda: workers(reward), 2):
        assert reward(completions=[FOR_EVER], tests=[TESTS]) == [0.0]
    reward.close()


def test_the_limit_of_processor_time_is_no_kill_from_outside() -> None:
    """Nor is that of a program that holds its signal off."""
    holds_on = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    reward = CodeReward(timeout_s=1.0, wall_s=300.0, workers=1)
    assert reward(completions=["def add(a, b):\n    while True: pass"], tests=[TESTS]) == [0.0]
    assert reward(completions=[holds_on + "while True: pass"], tests=[SCRIPT]) == [0.0]
    assert reward.counts == {"limit": 2}
    reward.close()


def test_a_clock_that_runs_behind_the_kernels_count_is_no_kill_from_outside() -> None:
    """On a busy machine a program of 1.0 s by the kernel's ticks has had 0.8 s by ``rusage``."""
    program = jail.spawn(forever, {}, Cell(frozenset({"limits"}), "/", 1.0, 1 << 29))
    while program.poll() is None:
        time.sleep(0.02)
    assert program.status == -signal.SIGXCPU
    assert not program.ended_by_itself
    assert not program.killed_from_outside(1.0)


def forever() -> None:
    while True:
        pass
