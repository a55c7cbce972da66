"""Landlock: a process gives up the file system, but for what it names. Needs no privilege and no namespace (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from grpo_lab.sandbox.kernel import syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}


def version() -> int:
    """The kernel's Landlock version; 0: none."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """From now on only these paths: read and execute, or everything but devices and sockets. Set no_new_privs first."""
    known = version()
    handled = _HANDLED[min(known, 5)]
    attributes = struct.pack(
        "QQQ", handled, 3 if known >= 4 else 0, 3 if known >= 6 else 0
    )  # TCP; signals, abstract sockets
    size = 8 if known < 4 else 16 if known < 6 else 24
    ruleset = syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    for path in readable:
        _allow(ruleset, path, handled & (_EXECUTE | _READ_FILE | _READ_DIR))
    for path in writable:
        _allow(ruleset, path, handled & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK))
    syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        access &= _FILE_ONLY
    syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), struct.pack("=Qi", access, place), ctypes.c_uint(0))
    os.close(place)
