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


class FolderGone(OSError):
    """Raised if the folder was removed, or moved away, while a run wrote into it."""


@contextmanager
def one_writer(folder: Path, lock: str = LOCK, what: str = "") -> Iterator[None]:
    """Hold the file ``lock`` in ``folder`` during the block, so that no other process can; the folder is made if
    missing. ``what`` names the locked thing in messages; by default it is the folder. Raises ValueError if another
    process has the lock (which, where, since when), or if it is a symbolic link. Raises FolderGone, whatever the
    block's outcome, if the folder was removed: half a run may be where it was."""
    file = folder / lock
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
                f"{what or f'`output_dir` {str(folder)!r}'} is in use: {said} writes there. Wait for its end"
                + (", or end it" if what else ", end it, or choose another `--output_dir`")
            )
        if is_there():
            break
        os.close(opened)  # one that its owner has just removed
    os.ftruncate(opened, 0)
    os.pwrite(opened, f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()},".encode(), 0)
    name = os.path.abspath(file)
    locks.HELD.add(name)
    try:
        yield
    finally:
        gone = not is_there()
        if not gone:
            file.unlink(missing_ok=True)
        os.close(opened)
        locks.HELD.discard(name)
        if gone:
            raise FolderGone(
                f"{str(folder)!r} was moved away, or it and {lock} in it removed, while this wrote into it: what "
                "stands there now is not all of it"
            )


def _locked(opened: int, file: Path) -> bool:
    try:
        return locks.lock(opened)
    except OSError as error:
        log.warning("%s cannot be locked (%s): nobody keeps a second run out of this folder", file, error)
        return True


def check_writable(folder: Path, setting: str = "output_dir") -> None:
    """Check that files can be written in the folder, or where it would be made. Raises ValueError if not."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if there.is_dir():
        why = ""
    else:
        if there.exists():
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
    """Return whether the folder holds nothing but its lock, a pipeline's marker of the stage, and half of a first file
    (``grpo_lab.io``), left when a run was killed."""
    return all(entry.name in (LOCK, STAGE) or entry.name.endswith(".json.part") for entry in folder.iterdir())


def is_only_marked(folder: Path) -> bool:
    """Return whether ``folder`` holds at most a command's own markers, and no file that it makes."""
    marks = (LOCK, RUN, STAGE)
    files = (one for one in folder.rglob("*") if not one.is_dir() and not one.name.endswith(".json.part"))
    return all(one.parent == folder and one.name in marks for one in files)


def record_of(folder: Path, command: str | None, marker: str = RUN) -> dict[str, Any]:
    """Return what an earlier run of ``command`` (None: of `grpo-lab train`) records in ``folder``; `{}` for a new one.
    A ``marker`` other than ``run.json`` belongs to one command alone. Raises ValueError if the folder holds something
    else, or cannot be written. Writes nothing."""
    check_writable(folder)
    found = read_marker(folder / marker)
    if found and (marker != RUN or found.get("pipeline") == command):
        return found
    if folder.is_dir() and not is_empty(folder):
        raise ValueError(f"`output_dir` {str(folder)!r} holds something else; choose another `--output_dir`")
    return {}


def write_run(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write ``run.json``: what was run, and how far it has come."""
    write_json(folder / RUN, summary)


def read_marker(file: Path, advice: str = RESCUE, needs: Fields | None = None) -> dict[str, Any]:
    """Return the contents of a file that marks a folder as ours; empty if it does not exist. Raises ValueError, with
    ``advice``, if it is damaged or lacks a field that it ``needs``."""
    if file.is_file():
        return read_record(file, needs, advice)
    return {}


def problems_in(file: Path) -> int:
    """Return the number of problems in a file of samples: its whole lines after the header."""
    if file.is_file():
        return max(0, file.read_bytes().count(b"\n") - 1)
    return 0


def kept(recipe: Any) -> str:
    """Say what a command that Ctrl-C ended has left in its folder: finished stages, samples, the newest checkpoint; of
    a pipeline also what its unfinished stages have."""
    folder: Path = recipe.output_dir
    seconds = read_marker(folder / RUN).get("seconds")
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
    """Return in words the newest checkpoint, the sampled problems and the answers in ``folder`` and its rounds."""
    steps = [int(place.name[11:]) for place in folder.glob("checkpoint-*") if place.name[11:].isdigit()]
    found = []
    if steps:
        found = [f"checkpoint-{max(steps)}"]
    for name in ("pass_rates", "guesses", "samples"):
        count = sum(problems_in(file) for file in folder.glob(f"{name}.jsonl"))
        found += [f"{name.replace('_', ' ')} of {count:,} problems"] if count else []
    for file in sorted(folder.glob("round-*/samples.jsonl")):
        if not (file.parent / "sample.json").is_file():
            found.append(f"{file.parent.name}, samples of {problems_in(file):,} problems")
    answers = sum(problems_in(file) + 1 for file in folder.glob("evaluation/answers.*.jsonl"))
    return found + ([f"blocks of answers: {answers:,}"] if answers else [])
