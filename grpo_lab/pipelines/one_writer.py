"""One process at a time writes into an output folder: two runs there would take each other's checkpoints, samples and log for theirs.

``run.lock`` in the folder is locked (POSIX, ``fcntl``) by the process that writes, and goes with its end; the kernel opens the lock of a
process that was killed. On a file system without such locks nothing is guarded. ``trainer.train()`` in a script takes none, as in TRL.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import tempfile
import time
from pathlib import Path

from grpo_lab.io import no_link

log = logging.getLogger(__name__)

LOCK = "run.lock"


class FolderGone(OSError):
    """The folder was removed, or moved away, while a run wrote into it."""


class OneWriter:
    """``with OneWriter(folder) as writer: … writer.take()``: from there to the end of the block the folder is this process's.

    Raises:
        FolderGone: at the end of the block, in place of what came of it: half a run may stand where the folder was.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / LOCK
        self._held: int | None = None

    def __enter__(self) -> OneWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._held is None:
            return
        gone = not self._is_there(self._held)
        if not gone:
            self.file.unlink(missing_ok=True)
        os.close(self._held)
        self._held = None
        if gone:
            raise FolderGone(
                f"{str(self.file.parent)!r} was moved away, or it and {LOCK} in it removed, while this wrote into it: what stands there now "
                "is not all of it"
            ) from error

    def take(self) -> OneWriter:
        """The folder is made where it is not there.

        Raises:
            ValueError: another process writes there: which, where, since when; or a link stands in the place of the lock.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        while self._held is None:
            opened = no_link(str(self.file), os.O_RDWR | os.O_CREAT)
            if not self._locked(opened):
                said = os.read(opened, 1000).decode(errors="replace").strip() or "another process"
                os.close(opened)
                raise ValueError(
                    f"`output_dir` {str(self.file.parent)!r} is in use: {said} writes there. Wait for its end, end it, or choose "
                    "another `--output_dir`"
                )
            if self._is_there(opened):  # not one that its owner has just removed
                self._held = opened
            else:
                os.close(opened)
        os.ftruncate(self._held, 0)
        os.pwrite(self._held, f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()},".encode(), 0)
        return self

    def _locked(self, opened: int) -> bool:
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            log.warning("%s cannot be locked (%s): nobody keeps a second run out of this folder", self.file, error)
        return True

    def _is_there(self, opened: int) -> bool:
        try:
            return os.path.samestat(os.fstat(opened), self.file.stat())
        except FileNotFoundError:
            return False


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
    """Whether nothing is in it but the lock, and the half of a first file where a kill fell (``grpo_lab.io``)."""
    return all(entry.name == LOCK or entry.name.endswith(".json.part") for entry in folder.iterdir())


__all__ = ["LOCK", "FolderGone", "OneWriter", "check_writable", "is_empty"]
