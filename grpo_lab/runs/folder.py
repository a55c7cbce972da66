"""A run's output folder: what marks it as whose, one process at a time that writes into it, and ``metrics.jsonl``.

``run.lock`` is locked (POSIX, ``fcntl``) by the process that writes, and opened by the kernel when that is killed. On a
file system without such locks nothing is guarded. ``trainer.train()`` in a script takes none, as in TRL."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_lab.io import append_json_line, no_link, write_json, write_whole_text
from grpo_lab.reading import Fields, read_record

log = logging.getLogger(__name__)

LOCK, RUN, STAGE = "run.lock", "run.json", "stage.json"
RESCUE = (
    "it says what this folder holds; put a copy back, or choose another `--output_dir` (its checkpoints can be read by "
    "trainer.train(resume_from_checkpoint=…))"
)


class FolderGone(OSError):
    """The folder was removed, or moved away, while a run wrote into it."""


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """In the block the folder, made where it is not there, is this process's. ValueError: another process writes there
    (which, where, since when), or a link stands in the place of the lock. FolderGone, in place of what came of the
    block: half a run may stand where the folder was."""
    file = folder / LOCK
    folder.mkdir(parents=True, exist_ok=True)

    def is_there() -> bool:
        try:
            return os.path.samestat(os.fstat(opened), file.stat())
        except FileNotFoundError:
            return False

    while True:
        opened = no_link(str(file), os.O_RDWR | os.O_CREAT)
        if not _locked(opened, file):
            said = os.read(opened, 1000).decode(errors="replace").strip() or "another process"
            os.close(opened)
            raise ValueError(
                f"`output_dir` {str(folder)!r} is in use: {said} writes there. Wait for its end, end it, or choose "
                "another `--output_dir`"
            )
        if is_there():
            break
        os.close(opened)  # one that its owner has just removed
    os.ftruncate(opened, 0)
    os.pwrite(opened, f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()},".encode(), 0)
    try:
        yield
    finally:
        gone = not is_there()
        if not gone:
            file.unlink(missing_ok=True)
        os.close(opened)
        if gone:
            raise FolderGone(
                f"{str(folder)!r} was moved away, or it and {LOCK} in it removed, while this wrote into it: what "
                "stands there now is not all of it"
            )


def _locked(opened: int, file: Path) -> bool:
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        log.warning("%s cannot be locked (%s): nobody keeps a second run out of this folder", file, error)
    return True


def check_writable(folder: Path, setting: str = "output_dir") -> None:
    """Try it, where the folder is or would be made, and leave no trace. ValueError where nothing can be written."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    why = "" if there.is_dir() else "that is no folder"
    try:
        if not why:
            tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # to be mended, and then the same command goes on
            raise
        why = f"nothing may be written there ({error.strerror})"
    if why:
        raise ValueError(f"`{setting}` {str(folder)!r} cannot be written: {there}: {why}; choose another")


def is_empty(folder: Path) -> bool:
    """Whether nothing is in it but the lock, what a pipeline says of its stage there, and the half of a first file
    where a kill fell (``grpo_lab.io``)."""
    return all(entry.name in (LOCK, STAGE) or entry.name.endswith(".json.part") for entry in folder.iterdir())


def record_of(folder: Path, command: str | None, marker: str = RUN) -> dict[str, Any]:
    """What an earlier run of ``command`` (None: of `grpo-lab train`) says of itself in ``folder``, `{}` for a new one;
    a ``marker`` other than ``run.json`` is of one command alone. ValueError: the folder holds something else, or
    nothing can be written there. Nothing is."""
    check_writable(folder)
    found = read_marker(folder / marker)
    if found and (marker != RUN or found.get("pipeline") == command):
        return found
    if folder.is_dir() and not is_empty(folder):
        raise ValueError(f"`output_dir` {str(folder)!r} holds something else; choose another `--output_dir`")
    return {}


def write_run(folder: Path, summary: Mapping[str, Any]) -> None:
    """``run.json``: what was run, and how far it has come."""
    write_json(folder / RUN, summary)


def read_marker(file: Path, advice: str = RESCUE, needs: Fields | None = None) -> dict[str, Any]:
    """What marks a folder as ours; empty where there is no such file. ValueError with ``advice``: it is damaged, or
    lacks a field that it ``needs``."""
    return read_record(file, needs, advice) if file.is_file() else {}


def problems_in(file: Path) -> int:
    """How many problems a file of samples holds: its whole lines after the header."""
    return max(0, file.read_bytes().count(b"\n") - 1) if file.is_file() else 0


def kept(recipe: Any) -> str:
    """What is in the folder of a command that Ctrl-C ended: stages that are done, samples, the newest checkpoint."""
    folder: Path = recipe.output_dir
    seconds = read_marker(folder / RUN).get("seconds")
    found = list(seconds) if isinstance(seconds, Mapping) else []
    steps = [int(place.name[11:]) for place in folder.glob("checkpoint-*") if place.name[11:].isdigit()]
    found += [f"checkpoint-{max(steps)}"] if steps else []
    samples = {name: problems_in(folder / f"{name}.jsonl") for name in ("pass_rates", "guesses", "samples")}
    found += [f"{name.replace('_', ' ')} of {count:,} problems" for name, count in samples.items() if count]
    return f"{'; '.join(found)} in {folder} (the same command goes on)" if found else "nothing"


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Appends every log of the main process to ``metrics.jsonl``, with its step. ``beside``: numbers that are written
    in front of it, and in no other log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beside: Callable[[], Mapping[str, float]] = dict

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "train_runtime" not in logs:  # HF's totals repeat the last step
            append_json_line(self.path, {"step": state.global_step, **self.beside(), **logs})


def cut_metrics(file: Path, step: int, evaluation_due: bool = False) -> None:
    """Leave the lines of ``metrics.jsonl`` up to ``step``: those after it will be written again, and so will, where it
    is due, the evaluation after ``step``. Half a line goes, too."""
    if file.is_file():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_whole_text(file, "".join(line for line in lines if _is_before(line, step, evaluation_due)))


def _is_before(line: str, step: int, evaluation_due: bool) -> bool:
    try:
        row = json.loads(line)
        again = evaluation_due and row["step"] == step and any(name.startswith("eval_") for name in row)
        return line.endswith("\n") and bool(row["step"] <= step) and not again
    except (ValueError, KeyError, TypeError):
        return False
