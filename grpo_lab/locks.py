"""Locks of files, which the kernel releases when the process that holds them ends, in whatever way.

They are POSIX locks: a child does not inherit them, so one that outlives a killed holder for a moment holds nothing. A
killed process itself keeps its locks until the kernel has removed all of it, which takes longer with more memory and a
slow last write to the disk. ``lock`` waits for such a process, and gives up at once for one that works on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import time
from pathlib import Path

LONGEST_END = 60.0
"""Longest time, in seconds, to wait for a process that is ending."""
_ON_LINUX = sys.platform == "linux"
_STRUCT = "hhqqi" if _ON_LINUX else "qqihh"
"""Layout of ``struct flock``: type, whence, start, length, process; on macOS start, length, process, type, whence."""
_EXITING = 0x4
"""Linux's flag of a process that is exiting (``PF_EXITING``)."""
_SIGKILL = 1 << 8
"""SIGKILL, number 9, in a mask of signals."""
HELD: set[str] = set()
"""Absolute paths of the files that this process has locked. They must not be opened for a look: closing any descriptor
of such a file releases the lock."""


def lock(opened: int) -> bool:
    """Lock an open file (``opened``: its descriptor) for this process.

    Returns whether this process has the lock now. False: another process has it and is not ending, or was still ending
    after ``LONGEST_END`` seconds. Raises OSError on a file system without locks.
    """
    last = time.monotonic() + LONGEST_END
    looks = 0
    while not _try_lock(opened):
        looks += 1
        holder = _holder(opened)
        if time.monotonic() > last or (looks > 1 and holder is not None and not _is_ending(holder)):
            return False
        time.sleep(0.02)
    return True


def is_locked(file: Path) -> bool:
    """Return whether a process, this one or another, has ``file`` locked; True if that cannot be known."""
    if os.path.abspath(file) in HELD:
        return True
    try:
        opened = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        holder = _holder(opened)
        return holder is not None and not _is_ending(holder)
    except OSError:
        return True
    finally:
        os.close(opened)


def _try_lock(opened: int) -> bool:
    """Try to lock the file without waiting, and return whether that succeeded."""
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _holder(opened: int) -> int | None:
    """Return the id of the process that has the file locked; 0 if that process is on another machine or in another
    container, None if nobody has it locked."""
    whole_file = (os.SEEK_SET, 0, 0, 0)
    if _ON_LINUX:
        asked = (fcntl.F_WRLCK, *whole_file)
    else:
        asked = (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    found = struct.unpack(_STRUCT, fcntl.fcntl(opened, fcntl.F_GETLK, struct.pack(_STRUCT, *asked)))
    kind, process = (found[0], found[4]) if _ON_LINUX else (found[3], found[2])
    if kind == fcntl.F_UNLCK:
        return None
    return max(0, process)


def _is_ending(process: int) -> bool:
    """Return whether a process was killed or is exiting, by its state, flags and pending signals in ``/proc``; also
    True if it has just gone, and False for 0 (not of this machine)."""
    if not process:
        return False
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return True  # it has just gone
    state = words[0]
    flags = int(words[6])
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    is_gone = state in "ZX"  # a zombie, or dead
    return is_gone or bool(flags & _EXITING) or any(signals & _SIGKILL for signals in pending)
