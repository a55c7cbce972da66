"""Tests of the tests' own machinery: the warm Python (:mod:`warm`) and who runs what (:mod:`by_file`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import by_file
import warm

TESTS = Path(__file__).resolve().parents[1]
REPORT = (
    "import os, sys; print(sys.argv[1:], os.environ['ASKED'], os.getcwd(), __name__, sys.stdin.read()); sys.exit(3)"
)


@pytest.mark.slow
def test_a_fork_is_a_process_like_another(tmp_path: Path) -> None:
    """Words, environment, folder, streams and exit code are the caller's; what ends one ends the other."""
    python = warm.python()
    done = subprocess.run(
        [python, "-c", REPORT, "a", "b c"],
        input="in", capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "ASKED": "yes"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, f"['a', 'b c'] yes {tmp_path} __main__ in\n")
    failed = subprocess.run([python, "-c", "1 / 0"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    killed = subprocess.run([python, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert killed.returncode == -signal.SIGKILL
    for number, code in ((signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)):
        words = "import os, signal, time; signal.signal(15, lambda *_: os._exit(7)); print(os.getpid(), flush=True); time.sleep(60)"
        with subprocess.Popen([python, "-c", words], stdout=subprocess.PIPE, text=True) as started:
            assert started.stdout is not None
            fork = int(started.stdout.readline())
            started.send_signal(number)
            assert started.wait(timeout=20) == code
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{fork}") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not os.path.exists(f"/proc/{fork}")


def test_what_is_made_once_a_session_is_made_by_one_worker() -> None:
    """Every user of the worlds of ranks is of their group; else each worker of xdist launches them all."""
    files = sorted((TESTS / "distributed").glob("test_*.py"))
    users = [file for file in files if re.search(r"worlds: dict\[int, World\]|sharded_world: World", file.read_text())]
    assert len(users) == 3
    assert {by_file.group_of(f"tests/distributed/{file.name}") for file in users} == {"ranks"}
    assert by_file.unit("tests/unit/test_kl.py::test_x[a::b]") == "tests/unit/test_kl.py"


def test_a_file_is_of_one_group() -> None:
    for file in TESTS.rglob("test_*.py"):
        found = re.findall(r"xdist_group\(([^)]*)\)", file.read_text())
        if file != Path(__file__):
            assert len(set(found)) <= 1, file
            assert all(re.fullmatch(r'"\w+"', name) for name in found), file
