"""The worker pool: limits, no lost jobs, no zombies. The handler is `builtins:eval`, so that a payload is a program."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo_lab.sandbox.pool import Patience
from grpo_lab.verifiers import Limits, VerifierError, WorkerPool

pytestmark = pytest.mark.slow

SLEEP = "__import__('time').sleep(600)"
SEGFAULT = "__import__('os').kill(__import__('os').getpid(), 11)"
HOG = "len([0] * 10**10)"  # 80 GB of pointers


def alive(pid: int) -> bool:
    """Running, or dead and unreaped (a zombie counts as alive)."""
    return Path(f"/proc/{pid}").exists()


def at_work(pid: int) -> bool:
    """Not dead: a zombie of a killed program is init's to reap, which may take its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_over(pids: list[int]) -> bool:
    """Waits for the end of all; what they are at would take longer."""
    deadline = time.monotonic() + 120
    while any(map(at_work, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(at_work, pids))


def when(condition: str) -> str:
    """A job that ends when the condition is true."""
    return (
        f"([... for os in [__import__('os')] for _ in iter(lambda: {condition} or __import__('time').sleep(0.02), "
        "True)], 5)[1]"
    )


@pytest.fixture
def meeting(tmp_path: Path) -> list[str]:
    """Two jobs that wait for each other, so that there are two workers."""
    log = str(tmp_path / "log")
    return [f"open({log!r}, 'a').write('x') and {when(f'os.path.getsize({log!r}) >= 2')}"] * 2


@pytest.fixture
def pool():
    with_limits = WorkerPool("builtins:eval", limits=Limits(cpu_seconds=5.0, wall_seconds=600.0), size=2)
    yield with_limits
    with_limits.close()


def test_values_come_back_in_order(pool: WorkerPool) -> None:
    outcomes = pool.run([f"{i} * {i}" for i in range(50)])
    assert [outcome.value for outcome in outcomes] == [i * i for i in range(50)]
    assert {outcome.status for outcome in outcomes} == {"ok"}


@pytest.mark.not_fast
def test_a_hang_a_crash_and_a_hog_cost_only_themselves() -> None:
    pool = WorkerPool("builtins:eval", limits=Limits(cpu_seconds=1.0, wall_seconds=4.0), size=2)
    jobs = ["1", SLEEP, "2", SEGFAULT, "3", HOG, "4", "9**9**9**9", "5"]
    outcomes = pool.run(jobs)
    assert [outcome.status for outcome in outcomes] == [
        "ok", "timeout", "ok", "crash", "ok", "crash", "ok", "timeout", "ok",
    ]  # fmt: skip
    assert [outcome.value for outcome in outcomes if outcome.status == "ok"] == [1, 2, 3, 4, 5]
    assert "SIGSEGV" in outcomes[3].reason
    assert "memory" in outcomes[5].reason
    assert pool.replaced >= 4
    assert 4.0 <= outcomes[1].seconds < 300  # asleep: ended by the clock
    pool.close()


@pytest.mark.not_fast
def test_work_is_measured_in_processor_time_so_that_a_busy_machine_is_no_timeout() -> None:
    pool = WorkerPool("builtins:eval", limits=Limits(cpu_seconds=0.3, wall_seconds=600.0), size=1)
    bomb, nap = pool.run(["9**9**9**9", "__import__('time').sleep(1.0)"])  # the nap takes longer but uses nothing up
    assert (bomb.status, nap.status) == ("timeout", "ok")
    assert "0.3 s of processor time" in bomb.reason
    pool.close()


def test_a_handler_that_raises_or_does_not_exist_is_a_bug_not_a_verdict(pool: WorkerPool) -> None:
    with pytest.raises(VerifierError, match="ZeroDivisionError"):
        pool.run(["1", "1/0", "2"])
    assert [outcome.value for outcome in pool.run(["7"])] == [7]  # and the pool is fit for use again
    with pytest.raises(VerifierError, match="no_such_module"):
        WorkerPool("no_such_module:f", size=1).run([1])


def test_large_payloads_and_values_cross_the_pipe(pool: WorkerPool) -> None:
    text = "x" * 2_000_000
    assert [outcome.value for outcome in pool.run([repr(text), f"len({text!r})"])] == [text, 2_000_000]


def test_nothing_starts_before_the_first_job(pool: WorkerPool) -> None:
    assert pool.pids == []
    assert pool.run([]) == []
    assert pool.pids == []
    pool.run(["1"])
    assert len(pool.pids) == 1  # one job needs one process


def test_a_worker_killed_while_idle_costs_no_job(pool: WorkerPool) -> None:
    pool.run(["1"])
    os.kill(pool.pids[0], signal.SIGKILL)
    time.sleep(0.2)
    assert [outcome.status for outcome in pool.run(["2", "3"])] == ["ok", "ok"]


def test_close_reaps_every_process(pool: WorkerPool, meeting: list[str]) -> None:
    pool.run(meeting)
    pids = pool.pids
    pool.close()
    assert not any(map(alive, pids))


def test_from_several_threads_at_once(pool: WorkerPool) -> None:
    results: dict[int, list[int]] = {}

    def work(n: int) -> None:
        results[n] = [outcome.value for outcome in pool.run([f"{n} + {i}" for i in range(10)])]

    threads = [threading.Thread(target=work, args=(n,)) for n in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n + i for i in range(10)] for n in (100, 200, 300)}


def test_a_pickled_copy_starts_processes_of_its_own(pool: WorkerPool) -> None:
    pool.run(["1"])
    copy = pickle.loads(pickle.dumps(pool))
    assert copy.pids == []
    assert [outcome.value for outcome in copy.run(["2"])] == [2]
    assert not set(copy.pids) & set(pool.pids)
    copy.close()


def test_a_fork_leaves_the_parents_workers_alone(pool: WorkerPool) -> None:
    pool.run(["1"])
    mine = pool.pids
    child = os.fork()
    if child == 0:
        right = pool.run(["2"])[0].value == 2 and not set(pool.pids) & set(mine)
        pool.close()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.pids == mine
    assert pool.run(["3"])[0].value == 3


SCRIPT = """
import sys
from grpo_lab.verifiers import Limits, WorkerPool
pool = WorkerPool("builtins:eval", limits=Limits(wall_seconds=600), size=2)
pool.run({meeting})
print(*pool.pids, flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('x')", "import os; os.kill(os.getpid(), 9)"])
def test_no_process_outlives_the_program(ending: str, meeting: list[str]) -> None:
    """Also a guard against `__main__` being run again in the workers: the script has no `__name__` guard."""
    script = SCRIPT.format(ending=ending, meeting=meeting)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert until_over(pids)


KILLED_AT_WORK = """
import os, sys, threading, time
from grpo_lab.verifiers import Limits, WorkerPool
pool = WorkerPool("builtins:eval", limits=Limits(cpu_seconds=600, wall_seconds=600), size=2)
pool.run({meeting})
child = os.fork()
if child == 0:  # what a data loader does: it holds a copy of every socket of ours
    os.close(1)
    time.sleep(600)
    os._exit(0)
print(child, *pool.pids, pool.fork_server_pid, flush=True)
threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
pool.run(["9**9**9**9", "__import__('time').sleep(60)"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_workers_in_the_middle_of_a_job_die_with_a_killed_program(meeting: list[str]) -> None:
    """One is deep in C code, one asleep, and a fork of the program keeps its sockets open."""
    script = KILLED_AT_WORK.format(meeting=meeting)
    running = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    fork, *pids = (int(pid) for pid in running.stdout.readline().split())
    assert len(pids) == 3
    assert running.wait(600) == -signal.SIGKILL
    assert until_over(pids)
    assert at_work(fork)
    os.kill(fork, signal.SIGKILL)
    running.stdout.close()


def test_a_killed_fork_server_costs_no_job(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(["1"])
    fork_server, workers, begun, killed = pool.fork_server_pid, pool.pids, tmp_path / "begun", tmp_path / "killed"
    assert fork_server is not None

    def kill() -> None:
        while not begun.exists():
            time.sleep(0.02)
        os.kill(fork_server, signal.SIGKILL)
        killed.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = pool.run([f"open({str(begun)!r}, 'w') and {when(f'os.path.exists({str(killed)!r})')}", "6"])
    killer.join()
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("ok", 5), ("ok", 6)]
    assert until_over(workers)
    assert [outcome.value for outcome in pool.run(["7"])] == [7]
    assert pool.fork_server_pid != fork_server


def test_a_fork_server_killed_while_a_worker_starts_costs_no_job(pool: WorkerPool, tmp_path: Path) -> None:
    """The one that was not ready ends first, and before its fork server can be waited for."""
    pool.run(["1"])
    fork_server, begun = pool.fork_server_pid, tmp_path / "begun"
    assert fork_server is not None
    os.kill(fork_server, signal.SIGSTOP)  # the second worker is asked for, and does not come

    def kill() -> None:
        while not begun.exists():
            time.sleep(0.02)
        os.kill(fork_server, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    anew = when(f"os.getppid() != {fork_server}")
    outcomes = pool.run([f"open({str(begun)!r}, 'w') and {anew}", "6"])
    killer.join()
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("ok", 5), ("ok", 6)]


def test_a_fork_server_killed_while_it_imports_costs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, killed = tmp_path / "begun", tmp_path / "killed"
    waits = f"if not os.path.exists({str(killed)!r}):\n    open({str(begun)!r}, 'w')\n    time.sleep(600)"
    (tmp_path / "handler_that_waits.py").write_text(f"import os, time\n{waits}\nevaluated = eval\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("handler_that_waits:evaluated", size=2)

    def kill() -> None:
        while not begun.exists():
            time.sleep(0.02)
        killed.touch()
        assert pool.fork_server_pid is not None
        os.kill(pool.fork_server_pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = pool.run(["5", "6"])
    killer.join()
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("ok", 5), ("ok", 6)]
    pool.close()


@pytest.mark.parametrize(
    ("ending", "said"),
    [("os._exit(3)", "ended with exit code 3"), ("os.abort()", "SIGABRT"), ("os.kill(os.getpid(), 9)", "9 times")],
)
def test_imports_that_end_by_themselves_or_always_are_a_bug(
    ending: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "handler_that_ends.py").write_text(f"import os\n{ending}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(VerifierError, match=rf"{said}.* before it was ready"):
        WorkerPool("handler_that_ends:evaluated", size=1).run(["5"])


def killed(log: Path, condition: str, number: int = 9, holding: int = 0) -> str:
    """A job that somebody kills while it holds so many bytes, where the condition is true of its number of tries."""
    tries = f"(open({str(log)!r}, 'a').write('k'), os.path.getsize({str(log)!r}))[1]"
    end = f"len(b'x' * {holding}) >= 0 and os.kill(os.getpid(), {number})"
    return f"[5 for os in [__import__('os')] if not ({tries} {condition} and {end})][0]"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_whose_worker_is_killed_from_outside_is_judged_again_alone_and_last(
    number: int, pool: WorkerPool, tmp_path: Path
) -> None:
    log, others = tmp_path / "log", tmp_path / "others"
    other = f"open({str(others)!r}, 'a').write('o')"
    alone = f"({killed(log, '== 1', int(number))}, __import__('os').path.getsize({str(others)!r}))"
    outcomes = pool.run([alone, *[other] * 9])
    assert [outcome.status for outcome in outcomes] == ["ok"] * 10
    assert outcomes[0].value == [5, 9]
    assert log.read_text() == "kk"


def test_killed_twice_it_is_unjudged_and_with_much_memory_a_crash(
    pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    greedy = WorkerPool("builtins:eval", limits=Limits(memory_bytes=1 << 28), size=1)
    for one, holding, status in ((pool, 0, "unjudged"), (greedy, 160 << 20, "crash")):
        log = tmp_path / status
        outcomes = one.run([killed(log, "> 0", holding=holding), "1"])
        assert [outcome.status for outcome in outcomes] == [status, "ok"]
        assert "SIGKILL, twice" in outcomes[0].reason
        assert log.read_text() == "kk"  # and no third time
    greedy.close()
    assert "1 of 2 answers were not judged: the process was ended by SIGKILL, twice" in caplog.text


def test_a_batch_of_hostile_jobs_ends_in_its_time_and_honest_ones_are_still_judged() -> None:
    """Of processor time, so that it is the same on a busy machine: 1 + 1 of 4 s are half, then 0.1 s each."""
    limits = Limits(cpu_seconds=1.0, wall_seconds=600.0, batch_seconds=4.0)
    pool = WorkerPool("builtins:eval", limits=limits, size=1)
    bomb = "9**9**9**9"
    outcomes = pool.run([bomb, "1", bomb, "2", *[bomb, "3"] * 3, *[bomb] * 200])
    statuses = [outcome.status for outcome in outcomes]
    assert statuses[:10] == ["timeout", "ok", "timeout", "ok", *["unjudged", "ok"] * 3]
    assert set(statuses[10:]) == {"unjudged"}
    assert "0.1 s of processor time; 2.1 s of this batch went to answers that end at their limit" in outcomes[4].reason
    assert sum(outcome.seconds > 0 for outcome in outcomes) == 2 + 20 + 5  # the others were not begun
    assert [outcome.status for outcome in pool.run(["1"])] == ["ok"]  # each batch has its own
    pool.close()


def test_what_a_batch_may_lose() -> None:
    patience = Patience(Limits(cpu_seconds=5.0, wall_seconds=30.0, batch_seconds=60.0), workers=2, jobs=1001)
    assert (patience.share, patience.over) == (1.0, False)  # 240 s: two workers, two thousand jobs begun
    patience.lost = 120.0
    assert (patience.share, patience.over) == (0.1, False)
    patience.lost = 240.0
    assert patience.over


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_worker_holds_no_socket_but_its_own(pool: WorkerPool, meeting: list[str]) -> None:
    """Not the fork server's, nor another worker's: it could speak for it."""
    links = (
        "[os.readlink(f'/proc/self/fd/{n}') for os in [__import__('os')] for n in range(64) if "
        "os.path.exists(f'/proc/self/fd/{n}')]"
    )
    pool.run(meeting)
    for outcome in pool.run([links] * 4):
        assert sum(link.startswith("socket:") for link in outcome.value) == 1, outcome.value


def test_a_killed_worker_is_replaced_by_a_fork_not_by_new_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven workers, one import of the handler: it writes a line for each."""
    log = tmp_path / "imports"
    (tmp_path / "handler_that_counts.py").write_text(f"open({str(log)!r}, 'a').write('x')\nevaluated = eval\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("handler_that_counts:evaluated", size=1)
    statuses = [outcome.status for outcome in pool.run([SEGFAULT] * 6 + ["1"])]
    assert statuses == ["crash"] * 6 + ["ok"]
    assert pool.replaced == 6
    assert log.read_text() == "x"
    pool.close()


def test_warm_up_returns_at_once_and_the_first_job_finds_the_imports_done(pool: WorkerPool) -> None:
    pool.warm_up()
    fork_server = pool.fork_server_pid
    assert fork_server is not None
    assert alive(fork_server)
    assert pool.pids == []
    pool.warm_up()
    assert [outcome.value for outcome in pool.run(["1"])] == [1]
    assert pool.fork_server_pid == fork_server
    pool.close()
    assert not alive(fork_server)


def test_started_in_a_thread_that_ends_the_workers_stay(pool: WorkerPool, meeting: list[str]) -> None:
    """A signal at the parent's death would come at the end of the thread that started them: TRL may call from any."""
    thread = threading.Thread(target=pool.run, args=(meeting,))
    thread.start()
    thread.join()
    pids = pool.pids
    time.sleep(0.7)  # longer than the fork server looks away
    assert len(pids) == 2
    assert all(map(alive, pids))
    assert [outcome.value for outcome in pool.run(["3", "4"])] == [3, 4]
    assert pool.pids == pids


def test_workers_see_no_secrets(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pool.run(["dict(__import__('os').environ).get('HF_TOKEN')"])[0].value is None


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="size"):
        WorkerPool("a:b", size=0)
    for name, value in {"cpu_seconds": 0, "wall_seconds": -1, "memory_bytes": 1000}.items():
        with pytest.raises(ValueError, match=name):
            Limits(**{name: value})
