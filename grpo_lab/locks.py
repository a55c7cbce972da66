"""Locks of files, which the kernel releases when the process that holds them ends, in whatever way.

They are POSIX locks: a child of the holder, which outlives it for a moment, does not inherit them. A process that was
killed keeps its locks until the kernel has removed all of it. That takes the longer, the larger its memory and the
slower its last write to the disk. Who asks for the lock meanwhile waits for that.
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
_SIGKILL = 1 << 8
HELD: set[str] = set()
"""Files that this process has locked. Closing another descriptor of one of them would release the lock."""


def lock(opened: int) -> bool:
    """Lock the file for this process. False: another living process has it. Raises OSError on a file system without
    locks."""
    last = time.monotonic() + LONGEST_END
    looks = 0
    while not _taken(opened):
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


def _taken(opened: int) -> bool:
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _holder(opened: int) -> int | None:
    """Return the process that has the file locked; 0 if it is on another machine or in another container, None if there
    is none."""
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
    """Return whether the process was killed and is not gone yet."""
    if not process:
        return False
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return True  # it has just gone
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return words[0] in "ZX" or bool(int(words[6]) & _EXITING) or any(one & _SIGKILL for one in pending)
