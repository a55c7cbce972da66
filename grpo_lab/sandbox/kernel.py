"""The few requests to the Linux kernel that Python 3.11 has no function for. ``OSError`` where it says no."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_SYS_MOUNT_SETATTR = 442  # as all syscalls above 423, the same on every machine
_SYS = {"x86_64": {"pivot_root": 155, "capset": 126}, "aarch64": {"pivot_root": 41, "capset": 91}}
_LIBC: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _checked(done: int, what: str) -> int:
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return done


def known_machine() -> bool:
    """Linux on a processor whose system calls are known here."""
    return _LIBC is not None and platform.machine() in _SYS


def syscall(number: int, *args: Any) -> int:
    return _checked(_LIBC.syscall(ctypes.c_long(number), *args), f"system call {number}")


def unshare(flags: int) -> None:
    _checked(_LIBC.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    done = _LIBC.mount(given[0], given[1], given[2], ctypes.c_ulong(flags), given[3])
    _checked(done, f"mount {source} on {target}")


def make_read_only(target: str, *, below: bool) -> None:
    """Read-only and without set-user-id; with ``below``, every mount under it too."""
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    flags = ctypes.c_uint(_AT_RECURSIVE if below else 0)
    syscall(_SYS_MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), os.fsencode(target), flags, attributes, ctypes.c_size_t(32))


def pivot_into(new_root: str) -> None:
    """``new_root`` is ``/`` from now on; the old one is out of reach."""
    os.chdir(new_root)
    syscall(_SYS[platform.machine()]["pivot_root"], b".", b".")
    _checked(_LIBC.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount of the old root")
    os.chdir("/")


def _prctl(option: int, value: Any, pointer: Any = 0) -> None:
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def die_with_parent(number: int) -> None:
    """Send this process the signal when its parent ends. A change of user takes this back: do it last."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Descendants whose parent ends become this process's children, wherever they have put themselves."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Other processes of this user can neither trace this one nor read its memory and environment."""
    _prctl(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter(instructions: bytes) -> None:
    """A seccomp filter for this process and all that it starts."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(program, len(program))
    _prctl(_PR_SET_SECCOMP, 2, buffer)


def drop_capabilities() -> None:
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    syscall(_SYS[platform.machine()]["capset"], header, none)
