"""The walls around a jailed process: which of them this machine gives, and their putting up, in the process itself.

``namespaces``  own processes, network (none), mounts (``view``), IPC and host name; the kernel ends all of it with its first process.
                As root directly; else in a user namespace, where the machine allows one.
``user``        as root: another user id, one a job, without any right. (Without root and without ``namespaces``: no.)
``seccomp``     refused system calls: sockets, new processes, tracing, mounts, io_uring, …
``landlock``    the file system given up but for Python (read-only) and the empty folder; no TCP; no signals out (by kernel version).
``limits``      processor time, address space, file size, open files, core dumps, processes. Everywhere.
"""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass

from grpo_lab.sandbox import kernel, landlock, seccomp, view

WALLS = ("namespaces", "user", "seccomp", "landlock", "limits")
_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_FIRST_USER = 1_000_000_000
_NOBODY = 65534
_OPEN_FILES, _PROCESSES, _THREADS = 64, 64, 256


@dataclass(frozen=True)
class Allowance:
    """What a jailed process may use: processor seconds, bytes of address space, bytes in files, and stack recursion."""

    cpu_seconds: float
    memory_bytes: int
    file_bytes: int = 16 << 20
    folder_bytes: int = 64 << 20


def enter_namespaces() -> None:
    """In the watching process: the next child is the first process of namespaces of its own (mounts: ``put_up``)."""
    if os.geteuid() == 0:
        try:
            kernel.unshare(_NAMESPACES)
            return
        except OSError:
            pass  # root without CAP_SYS_ADMIN, as in a container: a user namespace may still be allowed
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_NAMESPACES | kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def may_change_user() -> bool:
    """Root with the right to become somebody else, and a Python that others can reach (or a view in which they can)."""
    return os.geteuid() == 0


def job_user(job: int) -> int:
    """A user id that no other job has, so that its processes can be counted."""
    return _FIRST_USER + job % 100_000_000


def become(user: int) -> None:
    os.setgroups([])
    try:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container that maps few ids
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def reachable_by_others(path: str) -> bool:
    """Whether any user may pass every folder on the way to ``path``."""
    parts = path.strip("/").split("/")
    ways = ["/" + "/".join(parts[:n]) for n in range(len(parts) + 1)]
    return all(os.stat(way).st_mode & 0o001 for way in ways)


def put_up(walls: frozenset[str], allowance: Allowance, folder: str, job: int) -> None:
    """In the jailed process, as the last thing before what it is for. Any wall that cannot stand is an ``OSError``."""
    if "namespaces" in walls:
        kernel.unshare(kernel.CLONE_NEWNS)  # not before: a new root is one for every process of the namespace
        view.enter(allowance.folder_bytes)
        folder = view.INSIDE
    else:
        os.chdir(folder)
    counted = "namespaces" in walls or "user" in walls  # elsewhere the user's other processes would count
    _limit(allowance, (_THREADS if "seccomp" in walls else _PROCESSES) if counted else None)
    if "user" in walls:
        become(job_user(job))
    elif "namespaces" in walls:
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
    if kernel.known_machine():
        kernel.drop_capabilities()
        kernel.no_new_privileges()
    if "landlock" in walls:
        places = view.readable() + view.devices()
        landlock.restrict([one for one in places if os.path.exists(one)], [folder, "/dev/null"])
    if "seccomp" in walls:
        kernel.install_filter(seccomp.filter_of(None if "namespaces" in walls else os.getpid()))


def _limit(allowance: Allowance, processes: int | None) -> None:
    seconds = max(1, -int(-allowance.cpu_seconds // 1))
    wanted = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: allowance.memory_bytes,
        resource.RLIMIT_FSIZE: allowance.file_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
    for which, most in wanted.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that grows too large is an error there, as Python has it
