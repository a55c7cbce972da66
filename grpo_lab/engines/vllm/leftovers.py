"""What a process needs outside of its run folder, and may be killed with: each under a lock that the kernel opens at
its end, so that the next process sees what was left behind, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OLD_S = 5.0
"""Younger ones may be about to be locked."""


@contextmanager
def own_folder(prefix: str, parent: str | Path | None) -> Iterator[Path]:
    """A new folder for this user alone, in ``parent`` (None: for temporary files), gone after the block."""
    remove_left(Path(parent or tempfile.gettempdir()), f"{prefix}{'[a-z0-9_]' * 8}")
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    held = hold(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def hold(path: str | Path) -> int:
    """A descriptor: while it is open, the file or folder is this process's. OSError where it is another's, or not
    there."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def remove_left(parent: Path, pattern: str) -> None:
    """Files and folders of this user's that no process holds any more."""
    for place in parent.glob(pattern):
        with suppress(OSError):
            found = place.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _OLD_S:
                held = hold(place)
                shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink()
                os.close(held)
