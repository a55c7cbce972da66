"""Trainings that are killed while they save, or whose disk is full, and what a resume makes of them; each in a process
of its own.

    python tests/training/saving_worker.py OUT

Forks once per training (before the first backward: autograd's threads do not survive a fork), and writes
``report.json``: of the uninterrupted run and of each resumed one the weights' hash and the log; what each broken-off
run left; what a full disk said.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers.trainer_utils import get_last_checkpoint

from grpo_lab.trainer.resume import checkpoint as saving
from grpo_lab.trainer.resume import whole
from grpo_lab.trainer.resume.whole import newest_whole
from training.test_resume import build, history

SETTINGS: dict[str, Any] = {
    "steps_per_generation": 4,
    "objective": "dapo",
    "max_steps": 5,
    "save_steps": 1,
    "save_total_limit": 2,
}
BROKEN = 3
"""The step whose checkpoint is broken off; inside a generation batch."""


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.save`` that is killed in the middle of the optimizer's file."""

    def saved(what: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        stock(what, file, *args, **kwargs)
        if str(file).endswith("optimizer.pt"):
            os.truncate(file, os.path.getsize(file) // 2)
            die()

    return saved


def patched(owner: Any, name: str, value: Any) -> Callable[[Any], None]:
    return lambda trainer: setattr(trainer if owner is None else owner, name, value)


#: where in the saving the process is killed
POINTS: dict[str, Callable[[Any], None]] = {
    "before anything": patched(saving, "_best_of_before", die),
    "before the weights": patched(None, "_save", die),
    "in the optimizer": lambda _: setattr(torch, "save", half(torch.save)),
    "before the random numbers": patched(None, "_save_rng_state", die),
    "before the mark": patched(whole, "mark_of", die),
    "before the move": patched(whole, "move_whole", die),
    "before the pruning": patched(saving, "_prune", die),
}


def at_step(trainer: Any, number: int, arm: Callable[[Any], None]) -> None:
    """``arm`` when the saving of step ``number`` begins."""
    stock = trainer._save_checkpoint

    def armed(*args: Any) -> None:
        if trainer.state.global_step == number:
            arm(trainer)
        stock(*args)

    trainer._save_checkpoint = armed


def in_process(act: Callable[[], dict[str, Any]], out: Path) -> int:
    """``act`` in a fork; what it returns stands in ``out``. How the process ended."""
    pid = os.fork()
    if pid == 0:
        try:
            out.write_text(json.dumps(act()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trained(folder: Path, resume: bool = False, arm: Callable[[Any], None] | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer = build(folder, **SETTINGS)
    if arm is not None:
        at_step(trainer, BROKEN, arm)
    trainer.train(resume_from_checkpoint=resume or None)
    weights = torch.cat([value.detach().flatten() for value in trainer.model.parameters()])
    return {
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "history": history(trainer),
        **left(folder),
    }


def left(folder: Path) -> dict[str, Any]:
    newest, passed = newest_whole(folder)
    hfs = get_last_checkpoint(str(folder))
    return {
        "newest": newest and newest.name, "passed over": passed, "transformers' newest": hfs and Path(hfs).name,
        "folders": sorted(path.name for path in folder.iterdir() if path.is_dir()),
    }  # fmt: skip


def fill(folder: Path) -> Callable[[Any], None]:
    """No room from here on: a small file system that is full, or (where none may be mounted) no file beyond 4 KiB."""

    def full(_trainer: Any) -> None:
        if os.path.ismount(folder):
            with (folder / "ballast").open("wb", buffering=0) as ballast:
                try:
                    while True:
                        ballast.write(bytes(1 << 14))
                except OSError:
                    ballast.truncate(ballast.tell() - (1 << 15))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    return full


def mounted(folder: Path) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "grpo_lab_test", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def full_disk(home: Path) -> dict[str, Any]:
    folder = home / "full"
    small = mounted(folder)
    try:

        def run() -> dict[str, Any]:
            try:
                trained(folder, arm=fill(folder))
            except saving.CheckpointNotWritten as error:
                if not small:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
                return {"said": str(error), "mounted": small}
            return {}

        in_process(run, home / "said.json")
        (folder / "ballast").unlink(missing_ok=True)
        found = {**json.loads((home / "said.json").read_text()), **left(folder)}
        in_process(lambda: trained(folder, resume=True), home / "again.json")
        return {**found, "again": json.loads((home / "again.json").read_text())}
    finally:
        if small:
            subprocess.run(["umount", str(folder)], check=False)
            shutil.rmtree(folder, ignore_errors=True)


def main(out: str) -> None:
    home = Path(out)
    report: dict[str, Any] = {}
    in_process(lambda: trained(home / "whole"), home / "whole.json")
    report["whole"] = json.loads((home / "whole.json").read_text())
    for point, arm in POINTS.items():
        folder = home / point
        ended = in_process(lambda: trained(folder, arm=arm), home / "killed.json")  # noqa: B023 (called at once)
        found = left(folder)
        in_process(lambda: trained(folder, resume=True), home / "again.json")  # noqa: B023
        report[point] = {**found, "ended": ended, "again": json.loads((home / "again.json").read_text())}
    report["full disk"] = full_disk(home)
    (home / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
