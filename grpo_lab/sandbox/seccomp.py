"""The seccomp filter: calls that the kernel refuses to the program and to everything it starts.

Refused with EPERM: sockets, new processes (threads are allowed), tracing and reading other processes, namespaces and mounts, io_uring
(it opens sockets past such filters), keys, bpf, shared memory outside the memory limit, modules, and the like. ``clone3`` is ENOSYS,
whereupon the C library falls back to ``clone``, whose flags can be looked at.
"""

from __future__ import annotations

import platform
import struct

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SAME = {  # the same number on every machine
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_REFUSED = {
    "x86_64": {
        "socket": 41, "fork": 57, "vfork": 58, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248,
        "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "memfd_create": 319, "shmget": 29,
        "msgget": 68, "semget": 64, "mq_open": 240, "open_by_handle_at": 304, "init_module": 175, "finit_module": 313,
        "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "setpriority": 141,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "mount": 40, "umount2": 39,
        "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217, "request_key": 218,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "memfd_create": 279, "shmget": 194, "msgget": 186,
        "semget": 190, "mq_open": 180, "open_by_handle_at": 265, "init_module": 105, "finit_module": 273, "kexec_load": 104,
        "kexec_file_load": 294, "reboot": 142, "swapon": 224, "setpriority": 140,
    },
}  # fmt: skip
_WITHOUT_VIEW = {  # what Landlock does not look at: modes, owners, times, attributes of files; other processes' memory and pace
    "x86_64": {
        "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "fchmodat": 268, "fchownat": 260, "utime": 132,
        "utimes": 235, "utimensat": 280, "futimesat": 261, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
        "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "syslog": 103, "migrate_pages": 256, "move_pages": 279,
        "kcmp": 312, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251,
    },
    "aarch64": {
        "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88, "setxattr": 5, "lsetxattr": 6,
        "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "syslog": 116, "migrate_pages": 238,
        "move_pages": 239, "kcmp": 272, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30,
    },
}  # fmt: skip
_WITHOUT_VIEW_SAME = (
    440,
    448,
    452,
    463,
    466,
    469,
)  # process_madvise, process_mrelease, fchmodat2, setxattrat, removexattrat, file_setattr
_SIGNALS = {
    "x86_64": {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "prlimit64": 302,
               "sched_setaffinity": 203},
    "aarch64": {"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "prlimit64": 261,
                "sched_setaffinity": 122},
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3, _CLONE_THREAD = 435, 0x10000
_X32 = 0x40000000
_ALLOW, _KILL, _ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARG0_AT = 0, 4, 16


def _one(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _refuse(number: int, error: int = _EPERM) -> bytes:
    return _one(_JEQ, number, 0, 1) + _one(_RETURN, _ERRNO | error)


def _refuse_unless_zero(number: int, own: int) -> bytes:
    """Allowed for the first argument 0 or ``own`` (this process), refused for any other."""
    return (
        _one(_JEQ, number, 0, 5)
        + _one(_LOAD, _ARG0_AT)
        + _one(_JEQ, 0, 2, 0)
        + _one(_JEQ, own, 1, 0)
        + _one(_RETURN, _ERRNO | _EPERM)
        + _one(_RETURN, _ALLOW)
    )


def filter_of(own_pid: int | None) -> bytes:
    """The filter's instructions. ``own_pid``: where no namespaces are, also refuse what they would: signals to any other
    process, and what can be done to a file that may not be opened."""
    machine = platform.machine()
    parts = [_one(_LOAD, _ARCH_AT), _one(_JEQ, _ARCHES[machine], 1, 0), _one(_RETURN, _KILL), _one(_LOAD, _NUMBER_AT)]
    if machine == "x86_64":
        parts += [_one(_JGE, _X32, 0, 1), _one(_RETURN, _ERRNO | _ENOSYS)]
    parts += [_refuse(number) for number in (*_SAME.values(), *_REFUSED[machine].values())]
    parts.append(_refuse(_CLONE3, _ENOSYS))
    if own_pid is not None:
        parts += [_refuse(number) for number in (*_WITHOUT_VIEW[machine].values(), *_WITHOUT_VIEW_SAME)]
        parts += [_refuse_unless_zero(number, own_pid) for number in _SIGNALS[machine].values()]
    parts += [
        _one(_JEQ, _CLONE[machine], 0, 3),
        _one(_LOAD, _ARG0_AT),
        _one(_JSET, _CLONE_THREAD, 1, 0),
        _one(_RETURN, _ERRNO | _EPERM),
        _one(_RETURN, _ALLOW),
    ]
    return b"".join(parts)
