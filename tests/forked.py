"""Scripts as forks of one process that has imported torch, transformers and TRL: a world of ranks costs its trainings,
not its imports.

Python's own ``forkserver`` with a preload; it starts with the first fork and ends with the process that asked for it.
The imports cost fourteen seconds of a core where vLLM is installed, and the suite starts some seventy ranks. What a
fork does not show: faults of the imports themselves. ``cold`` launches keep these (:mod:`distributed.launch`).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))

TRAINER = (
    "grpo_lab.trainer.lab_trainer", "grpo_lab.rewards", "scripted_rollout", "trl.trainer.sft_trainer", "peft",
    "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip
forks = multiprocessing.get_context("forkserver")


def preload(modules: Sequence[str] = ()) -> None:
    """What the process imports that is forked, beside what a trainer needs; of no effect once it runs."""
    forks.set_forkserver_preload([*TRAINER, *modules])


preload()


def start(
    words: Sequence[str], printed: tuple[Path, Path], environment: Mapping[str, str], folder: Path | None = None
) -> BaseProcess:
    """``python SCRIPT ARGUMENTS…``, or ``python -m MODULE ARGUMENTS…``; what it prints is appended to the two files, of
    stdout and of stderr."""
    script = forks.Process(target=_become, args=(list(words), printed, dict(environment), folder or Path.cwd()))
    with mock.patch.dict(os.environ, PYTHONPATH=PATHS, OMP_NUM_THREADS="1"):  # of the server, should it start now
        script.start()
    return script


def run(words: Sequence[str], folder: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """To its end. ``more``: environment variables beside this process's own."""
    with tempfile.TemporaryDirectory() as temporary:
        printed = Path(temporary) / "out", Path(temporary) / "err"
        code = finish([start(words, printed, {**os.environ, **more}, folder)], timeout=1800)
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in printed))


def finish(scripts: Sequence[BaseProcess], timeout: float) -> int:
    """0 when all have ended well, else the first other code. Then the rest are killed, as all are when the time is
    over."""
    running = {script.sentinel: script for script in scripts}
    try:
        while running:
            ready = wait(list(running), timeout)
            assert ready, f"not at their end after {timeout:.0f} s"
            for sentinel in ready:
                script = running.pop(sentinel)
                script.join()
                if script.exitcode:
                    return script.exitcode
        return 0
    finally:
        for script in running.values():
            end_with_children(script.pid)
            script.join()


def end_with_children(pid: int | None) -> None:
    """Kill a process and all that it started, whatever groups and sessions they made. Parents first: none starts
    another one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        top.suspend()
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def as_rank(main: Callable[..., None]) -> None:
    """``main`` with the words of the script, on one thread; then the end of the process. It is not the interpreter's:
    gloo's threads race with that."""
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)


def _become(words: list[str], printed: tuple[Path, Path], environment: dict[str, str], folder: Path) -> None:
    """This fork as the script: its words, folder, environment and streams."""
    for stream, file in enumerate(printed, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    module = words[0] == "-m"
    beside = "" if module else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [beside, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = words[module:]
    gc.freeze()  # accelerate collects garbage in every train(): not among all that was imported
    begin = runpy.run_module if module else runpy.run_path
    begin(sys.argv[0], run_name="__main__")
