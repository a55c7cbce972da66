"""How tests start ranks and scripts: a fork is the script, its environment is the launcher's, and nothing outlives a
launch that fails."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import forked
from distributed.launch import ON_CPUS, RECIPES, accelerate_launch, of_ranks

CHILD = (
    "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(600)'], start_new_session=True).pid, flush=True); time.sleep(600)"
)


def over(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_child_in_a_session_of_its_own_ends_too() -> None:
    started = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout is not None
    child = int(started.stdout.readline())
    forked.end_with_children(started.pid)
    started.communicate()
    deadline = time.monotonic() + 60
    while not over(child):
        assert time.monotonic() < deadline, "the child outlives its launcher"
        time.sleep(0.05)


def script(folder: Path, *lines: str) -> str:
    (folder / "script.py").write_text("\n".join(lines))
    return str(folder / "script.py")


@pytest.mark.slow
def test_a_fork_is_the_script(tmp_path: Path) -> None:
    """Words, environment, folder, what is printed and the exit code; and a process that forks has one thread."""
    said = "import os, sys; print(sys.argv[1:], os.environ['ASKED'], os.getcwd(), __name__); sys.exit(3)"
    done = forked.run([script(tmp_path, said), "a", "b c"], folder=tmp_path, ASKED="yes")
    assert (done.returncode, done.stdout) == (3, f"['a', 'b c'] yes {tmp_path} __main__\n")
    failed = forked.run([script(tmp_path, "1 / 0")])
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    killed = forked.run([script(tmp_path, "import os; os.kill(os.getpid(), 9)")])
    assert killed.returncode == -signal.SIGKILL
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    threads = [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{server}/task").iterdir()]
    assert len(threads) - threads.count("jemalloc_bg_thd") == 1  # pyarrow's; it prepares for a fork and starts anew


@pytest.mark.slow
def test_one_rank_that_fails_or_a_time_that_is_over_ends_all(tmp_path: Path) -> None:
    lines = (
        "import os, time; open(os.environ['RANK'], 'w').write(str(os.getpid()))",
        "if os.environ['RANK'] == '1': 1 / 0",
    )
    words = [script(tmp_path, *lines, "time.sleep(600)")]
    for name, timeout, ends in (("fails", 600, {"0", "1"}), ("late", 0.1, {"0"})):
        (tmp_path / name).mkdir()
        printed = tmp_path / name / "printed"
        ranks = [forked.start(words, (printed, printed), {"RANK": rank}, tmp_path / name) for rank in sorted(ends)]
        if name == "late":
            with pytest.raises(AssertionError, match="not at their end after 0 s"):
                forked.finish(ranks, timeout)
        else:
            assert forked.finish(ranks, timeout) == 1
        assert all(over(rank.pid) for rank in ranks if rank.pid is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_the_environment_of_a_rank_is_the_launchers(config: str, processes: int, tmp_path: Path) -> None:
    """All that is of ours is of theirs, too; what torch's launcher adds for itself is listed."""
    kept = "import json, os; open(os.environ.get('RANK', '0'), 'w').write(json.dumps(dict(os.environ)))"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        accelerate_launch(RECIPES / f"{config}.yaml", processes, [script(tmp_path, kept)], cold=True)
    for rank, ours in enumerate(of_ranks(RECIPES / f"{config}.yaml", processes, {**os.environ, **ON_CPUS}, port=1)):
        theirs = json.loads((tmp_path / str(rank)).read_text())
        assert {name for name in theirs if ours.get(name) != theirs[name]} <= {
            "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
            "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE",
            "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        }  # fmt: skip
        assert ours.keys() <= theirs.keys()
