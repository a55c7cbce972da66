"""``accelerate launch`` of a worker in a world of n CPU processes (gloo), and reading what it left."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import warm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPES = ROOT / "recipes" / "accelerate"
PATHS = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))


@dataclass(frozen=True)
class World:
    """What the runs of one launch left in ``folder``."""

    processes: int
    folder: Path

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / f"{name}.pt", weights_only=True)
        return loaded

    def report(self, name: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return read

    def steps(self, name: str) -> list[dict[str, Any]]:
        """The logged row of every optimizer step."""
        return [row for row in self.report(name)["history"] if "loss" in row]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher(config: Path, processes: int, python: str = sys.executable) -> list[str]:
    """The launcher's words; the script and its own words follow."""
    command = [python, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [
        *command, "--num_processes", str(processes), "--main_process_port", str(free_port()), "--mixed_precision", "no",
    ]  # fmt: skip


def accelerate_launch(
    config: Path, processes: int, words: Sequence[str], timeout: float, cold: bool = False, **more: str
) -> str:
    """``accelerate launch --config_file config … words`` on CPU processes -> stdout + stderr; an error shows their end.

    The launcher and its ranks are forks of a process that has imported everything (:mod:`warm`); ``cold``: each imports for itself.

    ``config`` may be one of the recipes: their number of processes, port and precision are overridden, and
    ``ACCELERATE_USE_CPU`` makes every process a CPU rank. On an error every process below the launcher ends with it: a worker that
    hangs in a collective would outlive it, in a process group of its own, too.
    """
    alike = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": PATHS}
    started = subprocess.Popen(
        [*launcher(config, processes, sys.executable if cold else warm.python()), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **alike, **more},
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=timeout)
    except BaseException:
        end_with_children(started.pid)
        output, _ = started.communicate()
        print(output[-4000:])
        raise
    assert started.returncode == 0, output[-6000:]
    return output


def end_with_children(pid: int) -> None:
    """Kill a process and all that it started, whatever groups and sessions they made. Parents first: none starts another one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        top.suspend()
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def train_cases(
    processes: int,
    model: Path,
    out: Path,
    runs: list[dict[str, Any]],
    config: str = "ddp",
    before: Sequence[str] = (),
    timeout: float = 900,
    cold: bool = False,
    **more: str,
) -> World:
    """All ``runs`` in one launch: starting the processes costs more than training in them. ``more``: environment variables."""
    out.mkdir()
    (out / "spec.json").write_text(json.dumps({"model": str(model), "out": str(out), "runs": runs}))
    words = [*before, str(HERE / "worker.py"), str(out / "spec.json")]
    accelerate_launch(RECIPES / f"{config}.yaml", processes, words, timeout=timeout, cold=cold, **more)
    return World(processes, out)
