"""``CodeReward`` under attack: programs that want to be paid for nothing, want more than they are given, or want to do
harm.

Every attack scores 0, nothing outside changes, no process is left, no verdict is late. Where a machine gives no
namespaces, the same holds behind what it gives; attacks whose only wall is missing are left out, and the test says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from code_attacks import BY_THE_CLOCK, FORGED, GREEDY, HARMFUL, ON_FILES, ON_FORMS, TESTS

from grpo_lab.rewards import CodeReward
from grpo_lab.sandbox import client, jail
from grpo_lab.sandbox.pool import WorkerPool
from grpo_lab.sandbox.walls import WALLS as KNOWN_WALLS

WALL_S, CPU_S, MEMORY, WORKERS = 4.0, 1.0, 1 << 29, 6
ON_ITS_WAY_S = 30.0
"""For the start of processes on a busy machine, beside the limit; what sleeps, sleeps for ten minutes."""
WALLS = {
    "all walls": None,
    "no namespaces": ["seccomp", "landlock", "limits"],
    "no filter": ["namespaces", "user", "limits"],  # the kernel ends new processes with their namespace
}
NAMED_WALLS = {
    **WALLS,
    "namespaces and filter": ["namespaces", "seccomp", "limits"],
    "another user and filter": ["user", "seccomp", "limits"],
    "filter alone": ["seccomp", "limits"],
    **{f"Landlock {version}": ["seccomp", "landlock", "limits"] for version in (1, 3, 5)},
}
"""Every set that the docs name, and the same on kernels whose Landlock holds back neither truncation (before 3) nor
signals and abstract sockets (before 6)."""


@pytest.fixture
def any_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets that root is not given are tried as root, too."""
    monkeypatch.setattr(client, "_is_root", lambda: False, raising=False)


@pytest.fixture(params=WALLS)
def settings(request: pytest.FixtureRequest, any_user: None) -> dict[str, Any]:
    walls = NAMED_WALLS[request.param]
    try:
        assert CodeReward(walls=walls, workers=1).in_force
    except ValueError as error:
        pytest.skip(str(error))
    return {"timeout_s": CPU_S, "wall_s": WALL_S, "memory_bytes": MEMORY, "workers": WORKERS, "walls": walls}


@pytest.fixture
def reward(settings: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[CodeReward]:
    made = CodeReward(**settings)
    if "Landlock" in (name := request.node.callspec.params["settings"]):
        older = f"older_landlock:version_{name.split()[1]}"
        made._judge.pool = WorkerPool(older, limits=made._judge.pool.limits, size=WORKERS)
    yield made
    made.close()


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Orphans become children of this process: what an attack leaves behind is seen, in whatever session it hid."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    before = children()
    yield
    deadline = time.monotonic() + 60.0
    while children() - before and time.monotonic() < deadline:
        try:
            os.waitpid(-1, os.WNOHANG)  # orphans that have ended
        except ChildProcessError:
            break
        time.sleep(0.01)
    assert children() - before == set()


@pytest.fixture
def apart() -> Iterator[Path]:
    """A folder for temporary files, which other users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def children() -> set[int]:
    own = os.getpid()
    return {int(pid) for task in os.listdir(f"/proc/{own}/task") for pid in _words(f"/proc/{own}/task/{task}/children")}


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except FileNotFoundError:
        return []


def scores(reward: CodeReward, programs: dict[str, str]) -> dict[str, float | None]:
    texts = [f"```python\n{program}\n```" for program in programs.values()]
    return dict(zip(programs, reward(completions=texts, tests=[TESTS] * len(texts)), strict=True))


def nothing_paid(found: dict[str, float | None]) -> None:
    assert {name: score for name, score in found.items() if score != 0.0} == {}


@pytest.mark.slow
@pytest.mark.thorough(but="all walls")  # the tester, and no wall, keeps answers apart
def test_nothing_is_paid_for_a_forged_answer(reward: CodeReward, no_process_left: None) -> None:
    nothing_paid(scores(reward, FORGED))
    assert scores(reward, {"right": "def add(a, b):\n    return a + b"}) == {"right": 1.0}
    reward.close()


@pytest.mark.slow
@pytest.mark.thorough(but="all walls")
def test_nothing_is_paid_for_a_row_s_form(reward: CodeReward, no_process_left: None) -> None:
    programs, tests = zip(*ON_FORMS.values(), strict=True)
    nothing_paid(dict(zip(ON_FORMS, reward(completions=programs, tests=tests), strict=True)))
    reward.close()


@pytest.mark.slow
@pytest.mark.thorough(cases="all walls")  # the other two sets have each wall of it
def test_nothing_is_taken_beyond_the_limits(
    settings: dict[str, Any], no_process_left: None, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own (see there), so that the peak is that of these programs and of nothing before them."""
    left_out = BY_THE_CLOCK if settings["walls"] == WALLS["no filter"] else ()
    command = [sys.executable, Path(__file__).with_name("code_greedy.py"), json.dumps(settings), *left_out]
    environment = {**os.environ, "TMPDIR": str(apart)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    nothing_paid(found["scores"])
    rounds = math.ceil(len(GREEDY) / WORKERS)  # most of them wait, so that more than there are cores can go on at once
    assert found["seconds"] < rounds * (WALL_S + ON_ITS_WAY_S)
    assert 100 << 20 < found["peak"] < MEMORY * 5 / 4  # "a result of 100 MB" is held, "a growing list" is ended
    monkeypatch.setattr(jail.tempfile, "tempdir", str(apart))
    monkeypatch.setattr(jail, "LOCKED_WITHIN_S", -1.0)
    monkeypatch.setattr(jail, "_PATIENCE_S", 60.0)
    with jail.empty_folder(frozenset(), 0.0):  # what could not be removed in time, the next that comes removes
        assert len(list(apart.glob("grpo_lab_code_*"))) == 1


@pytest.mark.slow
@pytest.mark.thorough(cases=["Landlock 3", "Landlock 5"])
@pytest.mark.parametrize("settings", NAMED_WALLS, indirect=True)
def test_nothing_outside_is_touched(
    reward: CodeReward,
    no_process_left: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    canary, home = tmp_path / "canary", tmp_path / "home"
    canary.write_text("untouched")
    home.mkdir()
    before = [as_it_is(path) for path in (canary, home)]
    received: list[int] = []
    for name in ("SIGUSR1", "SIGWINCH", "SIGIO"):
        noticed(name, received, request)
    monkeypatch.setenv("CANARY_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server, mailboxes() as (path, name), shared_memory() as segment:
        server.settimeout(0.0)
        filled = {"CANARY_TOKEN": "CANARY_TOKEN", "CANARY": str(canary), "HOME": str(home)}
        filled |= {"TRAINER": str(os.getpid()), "PORT": str(server.getsockname()[1])}
        filled |= {"MAILBOX": path, "ABSTRACT": name, "SEGMENT": str(segment)}
        around = {"namespaces", "user", "landlock"} & set(reward.in_force)
        tried = {name: program for name, program in HARMFUL.items() if around or name not in ON_FILES}
        nothing_paid(scores(reward, {name: fill(program, filled) for name, program in tried.items()}))
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (canary.read_text(), sorted(tmp_path.iterdir()), list(home.iterdir())) == ("untouched", [canary, home], [])
    assert [as_it_is(path) for path in (canary, home)] == before
    assert received == []
    touched = (Path.home() / "touched", Path("/etc/grpo_lab_touched"), Path("/etc/cron.d/grpo_lab_touched"))
    assert [path for path in touched if path.exists()] == []
    assert scores(reward, {"right": "def add(a, b):\n    return a + b"}) == {"right": 1.0}
    reward.close()


@pytest.mark.not_fast
def test_the_filter_alone_lets_no_signal_and_no_datagram_out(any_user: None, request: pytest.FixtureRequest) -> None:
    """What no other wall holds back: the kernel signals the owner of a descriptor, and a pair sends to any address."""
    bare = CodeReward(timeout_s=CPU_S, wall_s=WALL_S, workers=1, walls=["seccomp", "limits"])
    received: list[int] = []
    for name in ("SIGUSR1", "SIGWINCH", "SIGIO"):
        noticed(name, received, request)
    went_out: list[str] = []
    for attack in (name for name in HARMFUL if name.startswith(("a signal by the owner", "datagrams of a pair"))):
        try:
            with mailboxes() as (path, name):
                filled = {"TRAINER": str(os.getpid()), "MAILBOX": path, "ABSTRACT": name}
                nothing_paid(scores(bare, {attack: fill(HARMFUL[attack], filled)}))
        except pytest.fail.Exception:  # a mailbox holds something
            went_out.append(attack)
        went_out += [attack] if received else []
        received.clear()
    bare.close()
    assert went_out == []


@contextlib.contextmanager
def mailboxes() -> Iterator[tuple[str, str]]:
    """A path and an abstract name where datagrams are taken, from anybody; none may come."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as both:
        Path(folder).chmod(0o755)
        path, name = f"{folder}/mailbox", f"grpo_lab_{os.getpid()}"
        open_ones = [both.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) for _ in "ab"]
        for one, address in zip(open_ones, (path, f"\0{name}"), strict=True):
            one.bind(address)
            one.settimeout(0.0)
        Path(path).chmod(0o777)
        yield path, name
        for one in open_ones:
            with pytest.raises(BlockingIOError):
                one.recv(100)


@contextlib.contextmanager
def shared_memory() -> Iterator[int]:
    """System V's, open to everybody; it stays, and what it says."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 4096, 0o1666)  # IPC_PRIVATE, IPC_CREAT
    at = libc.shmat(segment, None, 0)
    ctypes.memmove(at, b"untouched", 9)
    try:
        yield segment
        assert ctypes.string_at(at, 9) == b"untouched"
        again = libc.shmat(segment, None, 0)
        assert again not in (None, 2**64 - 1)
        libc.shmdt(ctypes.c_void_p(again))
    finally:
        libc.shmdt(ctypes.c_void_p(at))
        libc.shmctl(segment, 0, None)


def noticed(name: str, received: list[int], request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.Signals[name], lambda seen, frame: received.append(seen))
    request.addfinalizer(lambda: signal.signal(signal.Signals[name], before))


def as_it_is(path: Path) -> tuple[float, ...]:
    seen = path.stat()
    return seen.st_mode, seen.st_uid, seen.st_mtime, seen.st_nlink, len(os.listxattr(path))


def fill(program: str, filled: dict[str, str]) -> str:
    for name, value in filled.items():
        program = program.replace(name, value) if name != "CANARY_TOKEN" else program.replace(name, "\0")
    return program.replace("\0", "CANARY_TOKEN")


@pytest.mark.not_fast
def test_the_forgeries_are_real() -> None:
    """A harness that runs program and tests in one interpreter and trusts its exit status pays many of them."""
    paid = []
    for name in (
        "leaves before the tests", "os._exit(0)", "os._exit in the call", "equals everything",
        "an int that equals everything", "a mock", "patches AssertionError", "leaves at exit", "quit() in the call",
    ):  # fmt: skip
        done = subprocess.run([sys.executable, "-c", f"{FORGED[name]}\n{TESTS}"], capture_output=True, timeout=600)
        paid += [name] * (done.returncode == 0)
    assert len(paid) >= 6, paid


@pytest.mark.not_fast
def test_the_harm_is_real_where_the_walls_are_down(tmp_path: Path, any_user: None) -> None:
    """Two attacks that reach nothing but this test's own file and socket."""
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    bare = CodeReward(timeout_s=CPU_S, wall_s=WALL_S, workers=1, walls=["limits"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WALL_S)
        filled = {"CANARY": str(canary), "PORT": str(server.getsockname()[1])}
        names = ("a symbolic link out", "a socket to the trainer")
        nothing_paid(scores(bare, {name: fill(HARMFUL[name], filled) for name in names}))
        server.accept()[0].close()
    bare.close()
    assert canary.read_text() == "touched"


@pytest.mark.slow
def test_a_folder_is_removed_whatever_was_made_of_it(tmp_path: Path) -> None:
    """Deeper than a path is long and than Python recurses; modes of 0; links; and within its time, the rest another
    time."""
    top, outside = tmp_path / "top", tmp_path / "outside"
    outside.mkdir(mode=0o750)
    (top / "shut" / "in").mkdir(parents=True)
    (top / "link").symlink_to(outside)
    (top / "shut").chmod(0)
    here = os.open(top, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d" * 200, dir_fd=here)
        here, above = os.open("d" * 200, os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(here)
    assert not jail.remove_folder(str(top), time.monotonic() - 1.0)
    assert jail.remove_folder(str(top), time.monotonic() + 60.0)
    assert not top.exists()
    assert outside.stat().st_mode & 0o777 == 0o750


def test_a_folder_that_a_killed_worker_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(jail, "LOCKED_WITHIN_S", -1.0)
    left, outside = tmp_path / "grpo_lab_code_left", tmp_path / "outside"
    outside.mkdir()
    (left / "inside").mkdir(parents=True)
    (tmp_path / "grpo_lab_code_link").symlink_to(outside)
    with jail.empty_folder(frozenset(), 0.0) as held, jail.empty_folder(frozenset(), 0.0) as other:
        assert [Path(held).is_dir(), Path(other).is_dir(), left.exists()] == [True, True, False]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["grpo_lab_code_link", "outside"]


def test_a_wall_that_stands_with_others_alone_is_refused_before_the_first_program() -> None:
    """As root ``user`` stands behind namespaces; without them only where others can reach the interpreter."""
    walls, right = ["user", "seccomp", "limits"], {"right": "def add(a, b):\n    return a + b"}
    asked = CodeReward(workers=1, walls=walls)
    if asked._judge.missing["user"]:
        with pytest.raises(ValueError, match=r"only its owner may enter|only root"):
            scores(asked, right)
    else:
        assert scores(asked, right) == {"right": 1.0}
    asked.close()


@pytest.mark.parametrize("named", [["seccomp", "limits"], ["limits"], []])
def test_root_is_given_no_set_that_leaves_its_files(named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files end the machine (/proc/sysrq-trigger) and other processes (cgroup.kill), whatever system calls are left."""
    monkeypatch.setattr(client.os, "geteuid", lambda: 0)
    asked = CodeReward(workers=1, walls=named)
    asked._judge.missing = dict.fromkeys(KNOWN_WALLS, "")
    with pytest.raises(ValueError, match=r"`walls` is .*, and this is root: .*add one of .*'landlock', 'namespaces'"):
        asked.warm_up()
    for one in ("namespaces", "user", "landlock"):
        enough = CodeReward(workers=1, walls=[*named, one])
        enough._judge.missing = asked._judge.missing
        assert enough.in_force == [*named, one]
    none_given = CodeReward(workers=1)
    none_given._judge.missing = dict.fromkeys(("namespaces", "user", "landlock"), "not here") | {"seccomp": ""}
    with pytest.raises(ValueError, match=r"Run it elsewhere, or as another user than root$"):
        none_given.warm_up()
    monkeypatch.setattr(client.os, "geteuid", lambda: 1000)
    assert asked.in_force == named


def test_without_walls_it_is_refused_unless_asked_for(any_user: None) -> None:
    bare = CodeReward(workers=1)
    bare._judge.missing = dict.fromkeys(("namespaces", "user", "seccomp", "landlock"), "not here") | {"limits": ""}
    with pytest.raises(ValueError, match=r"keeps a model-written program from the files .*`walls: \['limits'\]`"):
        bare(completions=["x = 1"], tests=["assert x == 1"])


@pytest.mark.slow
def test_no_process_is_left_where_only_the_watcher_holds_them(no_process_left: None, any_user: None) -> None:
    """Neither namespaces nor filter nor user: what hides in sessions of its own, and what multiplies (here to 64), is
    found and ended."""
    bomb = "import os\nfor n in range(6):\n    os.fork()\nos.setsid()\nwhile True: pass"
    bare = CodeReward(timeout_s=CPU_S, wall_s=WALL_S, workers=1, walls=["limits"])
    nothing_paid(
        scores(
            bare, {name: GREEDY[name] for name in ("a child in the background", "a daemon")} | {"a bounded bomb": bomb}
        )
    )
    bare.close()
