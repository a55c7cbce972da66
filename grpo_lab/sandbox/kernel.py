"""Requests to the Linux kernel that Python 3.11 has no function for: namespaces, mounts, Landlock, seccomp. ``OSError``
where it says no.

Landlock: a process gives up the file system, but for what it names. Needs no privilege and no namespace (Linux 5.13).

The seccomp filter refuses with EPERM, to the program and to everything it starts: sockets, new processes (threads are
allowed), tracing and reading other processes, namespaces and mounts, io_uring (it opens sockets past such filters),
keys, bpf, shared memory outside the memory limit, modules, and the like. ``clone3`` is ENOSYS, whereupon the C library
falls back to ``clone``, whose flags can be looked at.
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

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_SYS_MOUNT_SETATTR = 442  # as all syscalls above 423, the same on every machine
_SYS_PIVOT_ROOT, _SYS_CAPSET = (155, 126) if platform.machine() == "x86_64" else (41, 91)
_LIBC: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = (  # name and number; x86_64/aarch64 where these differ, - where there is none
    "socket 41/198  fork 57/-  vfork 58/-  ptrace 101/117  process_vm_readv 310/270  process_vm_writev 311/271  "
    "mount 165/40  umount2 166/39  pivot_root 155/41  chroot 161/51  unshare 272/97  setns 308/268  keyctl 250/219  "
    "add_key 248/217  request_key 249/218  bpf 321/280  perf_event_open 298/241  userfaultfd 323/282  "
    "memfd_create 319/279  shmget 29/194  msgget 68/186  semget 64/190  mq_open 240/180  open_by_handle_at 304/265  "
    "init_module 175/105  finit_module 313/273  kexec_load 246/104  kexec_file_load 320/294  reboot 169/142  "
    "swapon 167/224  setpriority 141/140  pidfd_send_signal 424  io_uring_setup 425  io_uring_enter 426  "
    "io_uring_register 427  open_tree 428  move_mount 429  fsopen 430  fsconfig 431  fsmount 432  fspick 433  "
    "pidfd_open 434  pidfd_getfd 438  mount_setattr 442  memfd_secret 447"
)
_WITHOUT_VIEW = (  # what Landlock does not look at: modes, owners, times, attributes; other processes' memory, pace
    "chmod 90/-  fchmod 91/52  chown 92/-  fchown 93/55  lchown 94/-  fchmodat 268/53  fchownat 260/54  utime 132/-  "
    "utimes 235/-  utimensat 280/88  futimesat 261/-  setxattr 188/5  lsetxattr 189/6  fsetxattr 190/7  "
    "removexattr 197/14  lremovexattr 198/15  fremovexattr 199/16  syslog 103/116  migrate_pages 256/238  "
    "move_pages 279/239  kcmp 312/272  sched_setparam 142/118  sched_setscheduler 144/119  sched_setattr 314/274  "
    "ioprio_set 251/30  process_madvise 440  process_mrelease 448  fchmodat2 452  setxattrat 463  removexattrat 466  "
    "file_setattr 469"
)
_SIGNALS = (
    "kill 62/129  tkill 200/130  tgkill 234/131  rt_sigqueueinfo 129/138  rt_tgsigqueueinfo 297/240  "
    "prlimit64 302/261  sched_setaffinity 203/122"
)
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3, _CLONE_THREAD = 435, 0x10000
_X32 = 0x40000000
_ALLOW, _KILL, _ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARG0_AT = 0, 4, 16


def _checked(done: int, what: str) -> int:
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return done


def known_machine() -> bool:
    """Linux on a processor whose system calls are known here."""
    return _LIBC is not None and platform.machine() in _ARCHES


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
    syscall(_SYS_PIVOT_ROOT, b".", b".")
    _checked(_LIBC.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount of the old root")
    os.chdir("/")


def _prctl(option: int, value: Any, pointer: Any = 0) -> None:
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def die_with_parent(number: int) -> None:
    """Send this process the signal when its parent ends (on Linux). A change of user takes this back: do it last."""
    if _LIBC is not None:
        _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Descendants whose parent ends become this process's children, wherever they have put themselves."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Other processes of this user can neither trace this one nor read its memory and environment."""
    _prctl(_PR_SET_DUMPABLE, 0)


def install_filter(instructions: bytes) -> None:
    """A seccomp filter for this process and all that it starts."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(program, len(program))
    _prctl(_PR_SET_SECCOMP, 2, buffer)


def give_up_rights() -> None:
    """No capability, and none by any program that is started."""
    syscall(_SYS_CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def landlock_version() -> int:
    """The kernel's Landlock version; 0: none."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def give_up_files_but(readable: Sequence[str], writable: Sequence[str]) -> None:
    """From now on only these paths: read and execute, or all but devices and sockets. After ``give_up_rights``."""
    known = landlock_version()
    handled = _HANDLED[min(known, 5)]
    tcp, signals_and_sockets = 3 if known >= 4 else 0, 3 if known >= 6 else 0
    attributes = struct.pack("QQQ", handled, tcp, signals_and_sockets)
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


def _numbers(calls: str) -> list[int]:
    """Of the system calls of ``_REFUSED`` and its like, those that this machine has."""
    machine = 0 if platform.machine() == "x86_64" else -1
    return [int(number) for word in calls.split()[1::2] if (number := word.split("/")[machine]) != "-"]


def _one(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _refuse(number: int, error: int = _EPERM) -> bytes:
    return _one(_JEQ, number, 0, 1) + _one(_RETURN, _ERRNO | error)


def seccomp_filter(own_pid: int | None) -> bytes:
    """The filter's instructions. ``own_pid``: where no namespaces are, also refuse what they would: signals to any
    other process, and what can be done to a file that may not be opened."""
    machine = platform.machine()
    parts = [_one(_LOAD, _ARCH_AT), _one(_JEQ, _ARCHES[machine], 1, 0), _one(_RETURN, _KILL), _one(_LOAD, _NUMBER_AT)]
    if machine == "x86_64":
        parts += [_one(_JGE, _X32, 0, 1), _one(_RETURN, _ERRNO | _ENOSYS)]
    parts += [_refuse(number) for number in _numbers(_REFUSED)]
    parts.append(_refuse(_CLONE3, _ENOSYS))
    if own_pid is not None:
        parts += [_refuse(number) for number in _numbers(_WITHOUT_VIEW)]
        for number in _numbers(_SIGNALS):  # allowed for the first argument 0 or this process, refused for any other
            parts += [_one(_JEQ, number, 0, 5), _one(_LOAD, _ARG0_AT), _one(_JEQ, 0, 2, 0), _one(_JEQ, own_pid, 1, 0)]
            parts += [_one(_RETURN, _ERRNO | _EPERM), _one(_RETURN, _ALLOW)]
    parts += [_one(_JEQ, _CLONE[machine], 0, 3), _one(_LOAD, _ARG0_AT), _one(_JSET, _CLONE_THREAD, 1, 0)]
    parts += [_one(_RETURN, _ERRNO | _EPERM), _one(_RETURN, _ALLOW)]
    return b"".join(parts)
