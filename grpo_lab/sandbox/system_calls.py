"""The seccomp filter of a jail: the system calls that a Python program needs are allowed, every other one is refused.

Some calls are decided by their arguments. A process may signal only itself, and by no signal that cannot be caught: a
``SIGKILL`` comes from outside or from the limit of processor time. A descriptor gets no owner to be signalled, a pair
of sockets must be a connected stream, and ``clone`` must start a thread.

A refused call fails with ``EPERM``, for which Python raises ``PermissionError``. Calls that Linux got in 2019 or later,
known here or not, fail with ``ENOSYS``: the C library then does as on an older kernel (``clone3`` → ``clone``, whose
flags can be checked), while ``EPERM`` would be an error. Only a call of another architecture ends the process.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Names and numbers of the calls that are always allowed: "x86_64/aarch64" where the numbers differ, "-" where there is
# none.
_FILES = (  # on files: which of them can be opened is for the other walls
    "read 0/63  write 1/64  open 2/-  close 3/57  stat 4/-  fstat 5/80  lstat 6/-  newfstatat 262/79  statx 332/291  "
    "lseek 8/62  readv 19/65  writev 20/66  pread64 17/67  pwrite64 18/68  preadv 295/69  pwritev 296/70  "
    "preadv2 327/286  pwritev2 328/287  openat 257/56  access 21/-  faccessat 269/48  faccessat2 439  dup 32/23  "
    "dup2 33/-  dup3 292/24  pipe 22/-  pipe2 293/59  getdents 78/-  getdents64 217/61  getcwd 79/17  chdir 80/49  "
    "fchdir 81/50  rename 82/-  renameat 264/38  renameat2 316/276  mkdir 83/-  mkdirat 258/34  rmdir 84/-  "
    "creat 85/-  link 86/-  linkat 265/37  unlink 87/-  unlinkat 263/35  symlink 88/-  symlinkat 266/36  "
    "readlink 89/-  readlinkat 267/78  ftruncate 77/46  fallocate 285/47  fsync 74/82  fdatasync 75/83  "
    "fadvise64 221/223  sendfile 40/71  copy_file_range 326/285  flock 73/32  umask 95/166  statfs 137/43  "
    "fstatfs 138/44  getxattr 191/8  lgetxattr 192/9  fgetxattr 193/10  listxattr 194/11  llistxattr 195/12  "
    "flistxattr 196/13"
)
_WAITING = (  # for input, for a time, for its own signals
    "poll 7/-  ppoll 271/73  select 23/-  pselect6 270/72  epoll_create 213/-  epoll_create1 291/20  "
    "epoll_ctl 233/21  epoll_wait 232/-  epoll_pwait 281/22  epoll_pwait2 441  eventfd2 290/19  pause 34/-  "
    "alarm 37/-  getitimer 36/102  setitimer 38/103  time 201/-  gettimeofday 96/169  clock_gettime 228/113  "
    "clock_getres 229/114  nanosleep 35/101  clock_nanosleep 230/115  sched_yield 24/124"
)
_MEMORY = "brk 12/214  mmap 9/222  munmap 11/215  mremap 25/216  mprotect 10/226  madvise 28/233  msync 26/227"
_PAIRS = "shutdown 48/210  getsockname 51/204  getpeername 52/205  getsockopt 55/209"
_ITSELF = (  # of this process alone
    "execve 59/221  exit 60/93  exit_group 231/94  wait4 61/260  waitid 247/95  set_tid_address 218/96  "
    "set_robust_list 273/99  rseq 334/293  membarrier 324/283  getcpu 309/168  sched_getaffinity 204/123  "
    "sched_getparam 143/121  sched_getscheduler 145/120  sched_get_priority_max 146/125  "
    "sched_get_priority_min 147/126  getpid 39/172  gettid 186/178  getppid 110/173  getuid 102/174  "
    "geteuid 107/175  getgid 104/176  getegid 108/177  getresuid 118/148  getresgid 120/150  getgroups 115/158  "
    "getpgrp 111/-  getpgid 121/155  getsid 124/156  getpriority 140/141  getrlimit 97/163  setrlimit 160/164  "
    "getrusage 98/165  times 100/153  uname 63/160  sysinfo 99/179  getrandom 318/278  rt_sigaction 13/134  "
    "rt_sigprocmask 14/135  rt_sigreturn 15/139  rt_sigpending 127/136  rt_sigtimedwait 128/137  "
    "rt_sigsuspend 130/133  sigaltstack 131/132  restart_syscall 219/128"
)
# Allowed only in a view of the jail's own files. These change files, and Landlock does not check them (`truncate` only
# from its version 3 on).
_IN_A_VIEW = (
    "truncate 76/45  chmod 90/-  fchmod 91/52  fchmodat 268/53  utime 132/-  utimes 235/-  futimesat 261/-  "
    "utimensat 280/88"
)
_NEW_SINCE = 424
"""First of the system call numbers that are the same on every machine: pidfd_send_signal, of Linux 5.1."""
_ANY = 0xFFFFFFFF
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_EPERM = 1
_ENOSYS = 38
_LOAD = 0x20
_AND = 0x54
_JEQ = 0x15
_JGE = 0x35
_RETURN = 0x06
_NUMBER_AT = 0
_ARCH_AT = 4
_ARGUMENTS_AT = 16


@dataclass(frozen=True)
class Argument:
    """Condition on one argument of a system call: its lower 32 bits, masked by ``mask``, are one of ``values``. For the
    calls listed here the kernel itself looks at these bits alone.

    Attributes:
        place: number of the argument, from 0.
        values: the values that are compared.
        mask: bits that are compared; by default all 32.
        wanted: if False, the condition is that the argument is none of ``values``.
    """

    place: int
    values: tuple[int, ...]
    mask: int = _ANY
    wanted: bool = True

    def code(self, allow: bytes) -> bytes:
        """Return instructions that check the condition, followed by ``allow``: these instructions are run if it holds,
        and skipped if not."""
        load = _one(_LOAD, _ARGUMENTS_AT + 8 * self.place)
        if self.mask != _ANY:
            load += _one(_AND, self.mask)
        past = len(allow) // 8
        left = range(len(self.values) - 1, -1, -1)
        if self.wanted:
            tests = [_one(_JEQ, value, more, 0 if more else past) for value, more in zip(self.values, left)]
        else:
            tests = [_one(_JEQ, value, more + past) for value, more in zip(self.values, left)]
        return load + b"".join(tests) + allow


_FATAL = (9, 19)  # SIGKILL, SIGSTOP
_O_ASYNC = 0x2000
_FCNTL = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030)  # DUPFD, GETFD, SETFD, GETFL, locks (also OFD's), DUPFD_CLOEXEC
_F_SETFL = 4
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
"""Requests of ``ioctl`` that are allowed: TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE.
"""
_PR_NAME = (15, 16)
_ARCH_SET_FS = 0x1002
# SOCK_CLOEXEC | SOCK_NONBLOCK
_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_FLAGS = 0x80800
_MSG_OOB = 1  # a byte out of band: of no use to a program, and a way into kernels (CVE-2025-38236)
_FUTEX = (0, 1, 3, 4, 5, 9, 10)  # WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET: none of PI's
_FUTEX_OPERATION = 0x7F
_THREAD = 0x10000
_THREAD_FLAGS = 0x7D0F00  # as glibc and musl start one
_FILE_KIND = 0o170000
_PIPE = 0o010000


def _looked_at(own_pid: int) -> Iterator[tuple[str, list[list[Argument]]]]:
    """Yield the calls that are allowed only with certain arguments.

    Each is its name and numbers, and a list of alternatives; a call is allowed if all conditions of one alternative
    hold. ``own_pid``: the process that may signal itself.
    """
    itself = (0, own_pid)
    yield "futex 202/98", [[Argument(1, _FUTEX, _FUTEX_OPERATION)]]
    yield "fcntl 72/25", [[Argument(1, _FCNTL)], [Argument(1, (_F_SETFL,)), Argument(2, (0,), _O_ASYNC)]]
    yield "ioctl 16/29", [[Argument(1, _IOCTL)]]
    yield "kill 62/129", [[Argument(0, itself), Argument(1, _FATAL, wanted=False)]]
    yield "tkill 200/130", [[Argument(0, itself), Argument(1, _FATAL, wanted=False)]]
    yield "tgkill 234/131", [[Argument(0, itself), Argument(2, _FATAL, wanted=False)]]
    yield "prlimit64 302/261", [[Argument(0, itself)]]
    yield "sched_setaffinity 203/122", [[Argument(0, itself)]]
    yield "clone 56/220", [[Argument(0, (0,), _ANY ^ _THREAD_FLAGS), Argument(0, (_THREAD,), _THREAD)]]
    yield "socketpair 53/199", [[Argument(0, (_AF_UNIX,)), Argument(1, (_SOCK_STREAM,), _ANY ^ _SOCK_FLAGS)]]
    for name, flags_at in (("sendto 44/206", 3), ("recvfrom 45/207", 3), ("sendmsg 46/211", 2), ("recvmsg 47/212", 2)):
        yield name, [[Argument(flags_at, (0,), _MSG_OOB)]]
    yield "prctl 157/167", [[Argument(0, _PR_NAME)]]
    yield "arch_prctl 158/-", [[Argument(0, (_ARCH_SET_FS,))]]
    yield "mknod 133/-", [[Argument(1, (_PIPE,), _FILE_KIND)]]
    yield "mknodat 259/33", [[Argument(2, (_PIPE,), _FILE_KIND)]]


def numbers(calls: str) -> dict[str, int]:
    """Return name → number of the system calls in a text such as ``_FILES``, for those that this machine has."""
    here = 0
    if platform.machine() != "x86_64":
        here = -1
    words = calls.split()
    found = zip(words[::2], (word.split("/")[here] for word in words[1::2]), strict=True)
    return {name: int(number) for name, number in found if number != "-"}


def _one(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return one BPF instruction: operation, operand, and how many instructions are skipped after a comparison."""
    return struct.pack("HBBI", code, yes, no, value)


def _refuse(error: int) -> bytes:
    return _one(_RETURN, _ERRNO | error)


def _where(call: int, code: bytes) -> bytes:
    """Return instructions that run ``code`` if the system call has the number ``call``, and skip it if not. ``code``
    itself ends the filter."""
    return _one(_JEQ, call, 0, len(code) // 8) + code


def _any_of(ways: Iterable[list[Argument]]) -> bytes:
    """Return instructions that allow a call if all conditions of one of ``ways`` hold, and else refuse it."""
    parts = []
    for way in ways:
        code = _one(_RETURN, _ALLOW)
        for argument in reversed(way):
            code = argument.code(code)
        parts.append(code)
    return b"".join([*parts, _refuse(_EPERM)])


def seccomp_filter(own_pid: int, *, view: bool) -> bytes:
    """Return the instructions of the seccomp filter for the process ``own_pid``. ``view``: the process sees no files
    but those of its own jail, so it may also make the calls of ``_IN_A_VIEW``."""
    parts = [_one(_LOAD, _ARCH_AT), _one(_JEQ, ARCHES[platform.machine()], 1, 0), _one(_RETURN, _KILL)]
    parts.append(_one(_LOAD, _NUMBER_AT))
    for calls, ways in _looked_at(own_pid):
        parts += [_where(call, _any_of(ways)) for call in numbers(calls).values()]
    allowed = [_FILES, _WAITING, _MEMORY, _PAIRS, _ITSELF, *([_IN_A_VIEW] if view else [])]
    parts += [_where(call, _one(_RETURN, _ALLOW)) for call in numbers(" ".join(allowed)).values()]
    parts += [_one(_JGE, _NEW_SINCE, 0, 1), _refuse(_ENOSYS), _refuse(_EPERM)]
    return b"".join(parts)
