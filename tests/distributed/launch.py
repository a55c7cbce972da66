"""``accelerate launch`` of a worker in a world of n CPU processes (gloo), and reading what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.distributed import TCPStore

import forked
from forked import PATHS, ROOT, end_with_children
from ports import free_port

HERE = Path(__file__).resolve().parent
RECIPES = ROOT / "recipes" / "accelerate"
ON_CPUS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": PATHS}
ON_CPUS |= {"TRL_EXPERIMENTAL_SILENCE": "1"}
#: recipe → the script that brings it to CPU ranks
BEFORE = {"fsdp2": "cpu_fsdp2.py", "zero2": "cpu_zero.py", "zero3": "cpu_zero.py"}
LIMIT_S = 1800.0
"""Of a launch, on a machine that is busy with something else."""


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


def launcher(config: Path, processes: int) -> list[str]:
    """The launcher's words; the script and its own words follow."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [
        *command, "--num_processes", str(processes), "--main_process_port", str(free_port()), "--mixed_precision", "no",
    ]  # fmt: skip


def accelerate_launch(config: Path, processes: int, words: Sequence[str], cold: bool = False, **more: str) -> str:
    """``accelerate launch --config_file config … words`` on CPU processes -> stdout + stderr; an error shows their end.

    The ranks are forks of a process that has imported everything (:mod:`forked`), in the environment that accelerate's
    launcher gives them; ``cold``: the launcher itself, and every rank imports for itself.

    ``config`` may be one of the recipes: their number of processes, port and precision are overridden, and
    ``ACCELERATE_USE_CPU`` makes every process a CPU rank. On an error every process below the launcher ends with it: a
    worker that hangs in a collective would outlive it, in a process group of its own, too.
    """
    environment = {**os.environ, **ON_CPUS, **more}
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        printed.touch()
        try:
            if cold:
                code = cold_launch([*launcher(config, processes), *words], printed, environment)
            else:
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                ranks = of_ranks(config, processes, environment, store.port)
                code = forked.finish([forked.start(words, (printed, printed), of_rank) for of_rank in ranks], LIMIT_S)
        finally:
            output = printed.read_text(errors="replace")
            print(output[-4000:])
    assert code == 0, output[-20_000:]
    return output


def run_worker(
    name: str, config: str, ranks: int, *words: str | Path, cold: bool = False, on_gpu: bool = False, **more: str
) -> str:
    """``<name>.py`` of this folder, or at a whole path, on the ranks of a recipe -> stdout + stderr."""
    before = [str(HERE / BEFORE[config])] if config in BEFORE and not on_gpu else []
    script = [*before, str(HERE / f"{name}.py"), *map(str, words)]
    return accelerate_launch(RECIPES / f"{config}.yaml", ranks, script, cold=cold, **more)


def of_ranks(config: Path, processes: int, environment: Mapping[str, str], port: int) -> list[dict[str, str]]:
    """Each rank's environment, as ``accelerate launch`` and torchrun make it (``test_launch_ends`` compares)."""
    with mock.patch.dict(os.environ, environment):
        asked = launch_command_parser().parse_args([*launcher(config, processes)[3:], "script"])
        asked, *_ = _validate_launch_command(asked)
        if not (asked.multi_gpu or asked.use_fsdp):
            return [prepare_simple_launcher_cmd_env(asked)[1]]
        alike = prepare_multi_gpu_env(asked)
    alike |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    alike |= {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [{**alike, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def cold_launch(command: Sequence[str], printed: Path, environment: Mapping[str, str]) -> int:
    with printed.open("w") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        return started.wait(LIMIT_S)
    finally:
        if started.poll() is None:
            end_with_children(started.pid)
            started.wait()


def train_cases(
    processes: int,
    model: Path,
    out: Path,
    runs: list[dict[str, Any]],
    config: str = "ddp",
    cold: bool = False,
    on_gpu: bool = False,
    **more: str,
) -> World:
    """All ``runs`` in one launch: starting the processes costs more than training in them. ``more``: environment
    variables."""
    out.mkdir()
    (out / "spec.json").write_text(json.dumps({"model": str(model), "out": str(out), "runs": runs}))
    run_worker("worker", config, processes, out / "spec.json", cold=cold, on_gpu=on_gpu, **more)
    return World(processes, out)
