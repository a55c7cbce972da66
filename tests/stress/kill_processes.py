"""Process groups that are forked, watched and killed as a whole. What starts them has imported everything and computed
nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Ranks whose leader was killed become this process's to wait for (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def begin(work: Callable[[], int], ranks: int, log: Path, environment: Mapping[str, str]) -> int:
    """Run ``work`` in a new process group, once in each of ``ranks`` processes → the leader's number; its exit code is
    the worst."""
    port = free_port()
    file = log.open("ab")
    leader = os.fork()
    with suppress(PermissionError):  # each of the two may be the first: a kill may come at once
        os.setpgid(leader, leader)
    if leader:
        file.close()
        return leader
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    os.chdir(Path(__file__).parent)
    os.environ.update(environment)
    tqdm.set_lock(threading.RLock())  # else forks share one, and a killed one may have held it
    os._exit(finished(work) if ranks == 1 else all_ranks(work, ranks, port))


def all_ranks(work: Callable[[], int], ranks: int, port: int) -> int:
    """A process a rank; the first that fails ends all."""
    alike = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for rank in range(ranks):
        if os.fork() == 0:
            own = {**alike, "RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({name: str(value) for name, value in own.items()}, ACCELERATE_USE_CPU="true")
            os._exit(finished(work))
    for _ in range(ranks):
        if os.waitstatus_to_exitcode(os.wait()[1]) != 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
            return 1
    return 0


def finished(work: Callable[[], int]) -> int:
    try:
        code = work()
    except BaseException:  # also SystemExit: the exit is ours
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def kill(leader: int) -> None:
    """SIGKILL to all of the group, and wait until none of it is left."""
    os.killpg(leader, signal.SIGKILL)
    while True:  # the leader and its orphans
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def ended(leader: int) -> int | None:
    """The exit code, once there is one."""
    pid, status = os.waitpid(leader, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def has_ended(leader: int) -> bool:
    """Whether it did, with its exit code left for ``wait``."""
    return os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait(leader: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
