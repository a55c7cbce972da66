"""``accelerate launch`` of a worker in a world of n CPU processes (gloo), and reading what it left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: accelerate starts several processes for this type only; with ``MULTI_CPU`` and no mpirun it silently starts one
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
machine_rank: 0
num_processes: {processes}
main_process_port: {port}
use_cpu: true
mixed_precision: "no"
"""


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


def accelerate_launch(config: Path, processes: int, words: Sequence[str], timeout: float, **more: str) -> str:
    """Run ``accelerate launch`` on ``words`` and return stdout + stderr; an AssertionError shows the end of them.

    The whole process group ends with it: a worker that hangs in a collective would outlive its launcher.
    """
    config.write_text(CONFIG.format(processes=processes, port=free_port()))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = started.communicate(timeout=timeout)
    except BaseException:
        os.killpg(started.pid, signal.SIGKILL)
        output, _ = started.communicate()
        print(output[-4000:])
        raise
    assert started.returncode == 0, output[-6000:]
    return output


def train_cases(worker: Path, processes: int, model: Path, out: Path, runs: list[dict[str, Any]]) -> World:
    """All ``runs`` in one launch: starting the processes costs more than training in them."""
    out.mkdir()
    (out / "spec.json").write_text(json.dumps({"model": str(model), "out": str(out), "runs": runs}))
    accelerate_launch(out / "accelerate.yaml", processes, [str(worker), str(out / "spec.json")], timeout=900)
    return World(processes, out)
