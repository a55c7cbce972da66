"""The empty folder of a jailed process, where there is no view with one inside; and its removal, whatever was made of it.

A program may leave a hundred thousand files, or folders nested deeper than a path can be long. So the way down goes by descriptors, without
recursion; no verdict is later for it than ``_PATIENCE_S``; and what is left then, or by a worker that was killed, is removed by the next that
comes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_lab.sandbox import view

_PREFIX = "grpo_lab_code_"
_PATIENCE_S, _OLD_S = 0.2, 5.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def empty_folder(up: frozenset[str], deadline: float) -> Iterator[str]:
    """A new one, outside of any view; removed afterwards, which may take to a moment after the ``deadline`` (monotonic seconds). Behind
    ``namespaces`` the one inside the view."""
    if "namespaces" in up:
        yield view.INSIDE
        return
    _remove_abandoned()
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    held = os.open(folder, _FOLDER)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)  # the kernel lets go of it with this process
        os.chmod(folder, 0o777 if "user" in up else 0o700)
        yield folder
    finally:
        remove(folder, max(deadline, time.monotonic()) + _PATIENCE_S)
        os.close(held)


def remove(folder: str, until: float) -> bool:
    """Whether all of ``folder`` is gone by then (monotonic seconds)."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        here = os.open(folder, _FOLDER)
        try:
            os.fchmod(here, 0o700)  # from now on nobody else comes in
            while time.monotonic() < until:
                below = _without_files(here, until)
                if below is not None:
                    here = _step(here, below)
                    names.append(below)
                elif names:
                    here = _step(here, "..")
                    os.rmdir(names.pop(), dir_fd=here)
                else:
                    os.rmdir(folder)
                    return True
        finally:
            os.close(here)
    return False


def _without_files(here: int, until: float) -> str | None:
    """Removes what is no folder; the name of a folder in it, None where there is none."""
    below = None
    with os.scandir(here) as entries:
        for entry in entries:
            if time.monotonic() >= until:
                break
            if entry.is_dir(follow_symlinks=False):
                below = entry.name
            else:
                os.unlink(entry.name, dir_fd=here)
    return below


def _step(here: int, name: str) -> int:
    try:
        there = os.open(name, _FOLDER, dir_fd=here)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=here)
        there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    if name != "..":
        os.fchmod(there, 0o700)
    return there


def _remove_abandoned() -> None:
    """Folders of this user's that no worker holds."""
    until = time.monotonic() + _PATIENCE_S
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = os.open(place, _FOLDER)
            try:
                found = os.fstat(held)
                if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _OLD_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(str(place), until)
            finally:
                os.close(held)


__all__ = ["empty_folder", "remove"]
