"""Requests to the Linux kernel for which Python 3.11 has no function: namespaces, mounts, Landlock, seccomp. They raise
``OSError`` if the kernel refuses.

With Landlock a process gives up the file system, except the paths that it names. It needs no privilege and no namespace
(Linux 5.13).

The seccomp filter that is installed here is made by ``system_calls``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
import sys
from collections.abc import Sequence
from typing import Any

from grpo_lab.sandbox.system_calls import ARCHES

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SYS_MOUNT_SETATTR = 442  # as all syscalls above 423, the same on every machine
_SYS_PIVOT_ROOT, _SYS_CAPSET = (155, 126) if platform.machine() == "x86_64" else (41, 91)
_LIBC: Any = None
if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE = 444
_ADD = 445
_RESTRICT = 446
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE = 1 << 14
_IOCTL = 1 << 15
_MAKE_CHAR = 1 << 6
_MAKE_SOCK = 1 << 9
_MAKE_BLOCK = 1 << 11
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
# Landlock's version → the rights that a ruleset of it can restrict.
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}


def _checked(done: int, what: str) -> int:
    """Return the result of a C function; raise ``OSError`` about ``what`` if it is negative."""
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return done


def known_machine() -> bool:
    """Return whether this is Linux on a processor whose system calls are known here."""
    return _LIBC is not None and platform.machine() in ARCHES


def syscall(number: int, *args: Any) -> int:
    return _checked(_LIBC.syscall(ctypes.c_long(number), *args), f"system call {number}")


def unshare(flags: int) -> None:
    _checked(_LIBC.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    done = _LIBC.mount(given[0], given[1], given[2], ctypes.c_ulong(flags), given[3])
    _checked(done, f"mount {source} on {target}")


def make_read_only(target: str, *, below: bool) -> None:
    """Make a mount read-only and ignore set-user-id bits on it; with ``below``, also on every mount under it."""
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    flags = ctypes.c_uint(_AT_RECURSIVE if below else 0)
    syscall(_SYS_MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), os.fsencode(target), flags, attributes, ctypes.c_size_t(32))


def pivot_into(new_root: str) -> None:
    """Make ``new_root`` this process's ``/``; the old root becomes unreachable."""
    os.chdir(new_root)
    syscall(_SYS_PIVOT_ROOT, b".", b".")
    _checked(_LIBC.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount of the old root")
    os.chdir("/")


def _prctl(option: int, value: Any, pointer: Any = 0) -> None:
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def die_with_parent(number: int) -> None:
    """Have the kernel send this process the signal ``number`` when its parent ends (on Linux). A change of user undoes
    this: do it last."""
    if _LIBC is not None:
        _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, whatever session they are in."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Forbid other processes of this user to trace this one or to read its memory and environment."""
    _prctl(_PR_SET_DUMPABLE, 0)


def install_filter(instructions: bytes) -> None:
    """Install a seccomp filter (``system_calls.seccomp_filter``) for this process and all that it starts."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(program, len(program))
    _prctl(_PR_SET_SECCOMP, 2, buffer)


def give_up_rights() -> None:
    """Give up every capability, also for any program started later."""
    syscall(_SYS_CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 if it has none."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def give_up_files_but(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Restrict this process to some paths with Landlock, and forbid what else its version can: TCP, signals to
    processes outside, abstract sockets.

    Call ``give_up_rights`` first, or the kernel refuses.

    Args:
        readable: paths to read and execute.
        writable: paths for everything except to execute and to make devices and sockets.
    """
    known = landlock_version()
    handled = _HANDLED[min(known, 5)]
    tcp = 3 if known >= 4 else 0
    signals_and_sockets = 3 if known >= 6 else 0
    attributes = struct.pack("QQQ", handled, tcp, signals_and_sockets)
    size = 8  # of the attributes that this kernel knows
    if known >= 6:
        size = 24
    elif known >= 4:
        size = 16
    ruleset = syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    for path in readable:
        _allow(ruleset, path, handled & (_EXECUTE | _READ_FILE | _READ_DIR))
    for path in writable:
        _allow(ruleset, path, handled & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK))
    syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    """Add a rule to a Landlock ruleset: ``access`` below ``path``. If that is a file, the rule has only those of the
    rights that a file can have."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        access &= _FILE_ONLY
    syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), struct.pack("=Qi", access, place), ctypes.c_uint(0))
    os.close(place)
