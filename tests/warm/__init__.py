"""A Python that has everything imported: ``warm.python()`` is an executable whose every start is a fork of one process.

Importing torch, transformers, TRL and, where it is installed, vLLM costs ten seconds of a core; a world of four ranks paid it four times.
A fork pays nothing, and is a process like another: its own memory, environment, folder, standard streams and exit code; a signal for it
reaches it, and it dies with the one who started it. What a fork does not show: faults of the imports themselves, and of the order
of sets, since all forks share a hash seed. ``cold`` launches keep these: ``test_real_run`` (the command as a team types it) and ``test_zero``.

``WARM_CHILDREN=1`` in the environment of a script: the scripts that it starts by ``sys.executable`` are forks likewise.

One server serves the whole session, both workers of xdist too, and ends with the last of them.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent


@functools.cache
def python() -> str:
    """The executable; the plain interpreter, with a warning, where forks of a process with imports are not safe."""
    if sys.platform != "linux":
        return sys.executable
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    folder = Path(tempfile.gettempdir()) / f"warm-{os.getuid()}-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _connected(folder):
            _start(folder)
        if not _held:
            said = (folder / "log").read_text()[-2000:]
            warnings.warn(f"no warm Python, so every rank imports for itself: {said}", stacklevel=2)
            return sys.executable
    return str(folder / "python")


_held: list[socket.socket] = []  # open as long as this process lives: the server ends when nobody holds one


def _start(folder: Path) -> None:
    """Detached: tests that look for processes left below their own must not find it."""
    failed = folder / "failed"
    if failed.exists():
        return
    fork = f'exec "{sys.executable}" -I -S "{HERE / "client.py"}" "{folder / "socket"}" "$@"'
    plain = f'[ "$1" = -c ] && exec "{sys.executable}" "$@"'  # the package's own workers: open files and flags as they ask for
    for name, lines in (("python", [fork]), ("children", [plain, fork])):
        (folder / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
        (folder / name).chmod(0o700)
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    detached = '(cd / && "$0" "$1" "$2" || touch "$2/failed") > "$2/log" 2>&1 < /dev/null &'
    subprocess.run(
        ["sh", "-c", detached, sys.executable, str(HERE / "server.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, start_new_session=True, check=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not _connected(folder) and not failed.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _connected(folder: Path) -> bool:
    lease = socket.socket(socket.AF_UNIX)
    try:
        lease.connect(str(folder / "socket"))
        lease.sendall(b"lease\n")
        if lease.recv(16) == b"held\n":
            _held.append(lease)
            return True
    except OSError:
        pass
    lease.close()
    return False
