"""A run's output folder: the files that mark whose it is, and a lock so that only one process at a time writes into it.

The writing process locks ``run.lock`` (POSIX, ``fcntl``); the kernel unlocks it if that process is killed. On a file
system without such locks nothing is guarded. ``trainer.train()`` in a script takes no lock, as in TRL.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lab import locks
from grpo_lab.io import no_link, write_json
from grpo_lab.reading import Fields, read_record

log = logging.getLogger(__name__)

LOCK = "run.lock"
RUN = "run.json"
STAGE = "stage.json"
RESCUE = (
    "it says what this folder holds; put a copy back, or choose another `--output_dir` (its checkpoints can be read by "
    "trainer.train(resume_from_checkpoint=…))"
)
"""Advice in the error about a damaged ``run.json``."""


class FolderGone(OSError):
    """Raised if the folder was removed, or moved away, while a run wrote into it."""


@contextmanager
def one_writer(folder: Path, lock: str = LOCK, what: str = "") -> Iterator[None]:
    """Keep other processes out of ``folder`` during the block, by a locked file in it; make the folder if needed.

    Args:
        folder: the folder that the block writes into.
        lock: name of the locked file, which is removed after the block.
        what: what is locked, in words for messages; by default the folder.

    Raises:
        ValueError: another process has the lock (the error says which, where and since when), or the file is a
            symbolic link.
        FolderGone: the folder, or the locked file, was removed during the block. This is raised also where the block
            itself failed: what stands at the path now may be only half of a run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / lock
    opened = _open_locked(file, what)
    os.ftruncate(opened, 0)
    os.pwrite(opened, f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()},".encode(), 0)
    name = os.path.abspath(file)
    locks.HELD.add(name)
    try:
        yield
    finally:
        gone = not _is_at(opened, file)
        if not gone:
            file.unlink(missing_ok=True)
        os.close(opened)
        locks.HELD.discard(name)
        if gone:
            raise FolderGone(
                f"{str(folder)!r} was moved away, or it and {lock} in it removed, while this wrote into it: what "
                "stands there now is not all of it"
            )


def _open_locked(file: Path, what: str) -> int:
    """Open ``file``, made if needed, and lock it; return its descriptor. Raises ValueError as ``one_writer`` does."""
    while True:
        opened = no_link(str(file), os.O_RDWR | os.O_CREAT)
        if not _locked(opened, file):
            said = os.read(opened, 1000).decode(errors="replace").strip() or "another process"
            os.close(opened)
            raise ValueError(
                f"{what or f'`output_dir` {str(file.parent)!r}'} is in use: {said} writes there. Wait for its end"
                + (", or end it" if what else ", end it, or choose another `--output_dir`")
            )
        if _is_at(opened, file):
            return opened
        os.close(opened)  # its owner removed the file between our open and our lock: open the new one


def _is_at(opened: int, file: Path) -> bool:
    """Return whether the open file ``opened`` is still the one at the path ``file``."""
    try:
        return os.path.samestat(os.fstat(opened), file.stat())
    except FileNotFoundError:
        return False


def _locked(opened: int, file: Path) -> bool:
    """Lock the open ``file``; return False if another process has it. Where files cannot be locked, warn and go on."""
    try:
        return locks.lock(opened)
    except OSError as error:
        log.warning("%s cannot be locked (%s): nobody keeps a second run out of this folder", file, error)
        return True


def check_writable(folder: Path, setting: str = "output_dir") -> None:
    """Raise ValueError, which names ``setting``, if no file can be written in ``folder`` or, while it does not exist,
    in the nearest folder above it. Raises OSError if the disk is full or over its quota."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if there.is_dir():
        why = ""
    elif there.exists():
        why = "that is no folder"
    else:
        why = "that is a link which leads nowhere"
    try:
        if not why:
            tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # with room again, the same command goes on
            raise
        why = f"nothing may be written there ({error.strerror})"
    if why:
        raise ValueError(f"`{setting}` {str(folder)!r} cannot be written: {there}: {why}; choose another")


def is_empty(folder: Path) -> bool:
    """Return whether the folder holds no more than its lock, a stage's marker, and JSON files that a killed process had
    half written (`*.json.part`, ``grpo_lab.io``)."""
    return all(entry.name in (LOCK, STAGE) or entry.name.endswith(".json.part") for entry in folder.iterdir())


def is_only_marked(folder: Path) -> bool:
    """Return whether ``folder``, with all folders in it, holds no file but a command's own markers: `run.lock`,
    `run.json`, `stage.json`, and half-written JSON files."""
    marks = (LOCK, RUN, STAGE)
    files = (one for one in folder.rglob("*") if not one.is_dir() and not one.name.endswith(".json.part"))
    return all(one.parent == folder and one.name in marks for one in files)


def record_of(folder: Path, command: str | None, marker: str = RUN) -> dict[str, Any]:
    """Return what an earlier run has recorded in ``folder``; `{}` if the folder is new. Nothing is written.

    Args:
        folder: the output folder.
        command: name of the command that must have made the run; None: `grpo-lab train`.
        marker: file that records the run. One other than ``run.json`` belongs to a single command, and the name in it
            is not compared.

    Raises:
        ValueError: the folder holds something else, or cannot be written.
    """
    check_writable(folder)
    found = read_marker(folder / marker)
    if found and (marker != RUN or found.get("pipeline") == command):
        return found
    if folder.is_dir() and not is_empty(folder):
        raise ValueError(f"`output_dir` {str(folder)!r} holds something else; choose another `--output_dir`")
    return {}


def write_run(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary``, what is run and how far it has come, as ``run.json``."""
    write_json(folder / RUN, summary)


def read_marker(file: Path, advice: str = RESCUE, needs: Fields | None = None) -> dict[str, Any]:
    """Return the contents of a JSON file that marks a folder as ours; `{}` if there is no such file. Raises ValueError,
    with ``advice``, if it is damaged or lacks a field of ``needs``."""
    if file.is_file():
        return read_record(file, needs, advice)
    return {}


def problems_in(file: Path) -> int:
    """Return the number of problems in a file of samples: its whole lines after the header."""
    if file.is_file():
        return max(0, file.read_bytes().count(b"\n") - 1)
    return 0


def kept(recipe: Any) -> str:
    """Describe what an unfinished run of ``recipe`` has left in its folder: its finished stages, samples, the newest
    checkpoint and, of a pipeline, the same of each unfinished stage. "nothing" if it has left nothing."""
    folder: Path = recipe.output_dir
    seconds = read_marker(folder / RUN).get("seconds")  # of each finished stage
    found = []
    if isinstance(seconds, Mapping):
        found = list(seconds)
    names = [str(one.name) for one in getattr(recipe, "stages", ())]
    done = [name for name in names if read_marker(folder / name / STAGE).get("status") == "done"]
    found += [*done, *_half_done(folder)]
    for name in names:
        if name not in done:
            found += [f"{name}: {one}" for one in _half_done(folder / name)]
    if found:
        return f"{'; '.join(found)} in {folder} (the same command goes on)"
    return "nothing"


def _half_done(folder: Path) -> list[str]:
    """List in words what unfinished work ``folder`` holds: the newest checkpoint, sampled problems (also of its
    rounds), and answers of an evaluation."""
    endings = [place.name.removeprefix("checkpoint-") for place in folder.glob("checkpoint-*")]
    steps = [int(one) for one in endings if one.isdigit()]
    found = []
    if steps:
        found = [f"checkpoint-{max(steps)}"]
    for name in ("pass_rates", "guesses", "samples"):
        count = sum(problems_in(file) for file in folder.glob(f"{name}.jsonl"))
        found += [f"{name.replace('_', ' ')} of {count:,} problems"] if count else []
    for file in sorted(folder.glob("round-*/samples.jsonl")):
        if not (file.parent / "sample.json").is_file():
            found.append(f"{file.parent.name}, samples of {problems_in(file):,} problems")
    answers = sum(problems_in(file) + 1 for file in folder.glob("evaluation/answers.*.jsonl"))  # without a header
    if answers:
        found.append(f"blocks of answers: {answers:,}")
    return found
