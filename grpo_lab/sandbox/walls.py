"""Walls, the isolation layers of a jailed process, and putting them up in the process itself.

``namespaces``  its own processes, network (none), IPC, host name and mounts: a view of Python and the system's
                libraries, read-only, and an empty ``/tmp``. All of it ends with its first process. Root does this
                directly, others in a user namespace, if the machine allows one.
``user``        only as root: another user id for each job, without any right.
``seccomp``     only the system calls that Python needs: no sockets, new processes, tracing, signals to others, ….
``landlock``    no files but Python (read-only) and the empty folder; no TCP and no signals to others, if the kernel's
                version can forbid them.
``limits``      processor time, address space, file size, open files, core dumps, processes. Available everywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import stat
import sys
import tempfile
from dataclasses import dataclass

from grpo_lab.sandbox import kernel
from grpo_lab.sandbox.system_calls import seccomp_filter

WALLS = ("namespaces", "user", "seccomp", "landlock", "limits")
_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_NOBODY = 65534
_OPEN_FILES = 64
_PROCESSES = 64
_THREADS = 256
_SYSTEM = "/usr /lib /lib32 /lib64 /bin /nix/store /etc/ld.so.cache /etc/localtime /etc/alternatives"
_DEVICES = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom"
INSIDE = "/tmp"
"""Path of the jail's empty folder, behind ``namespaces`` as the jailed process sees it."""
INTERPRETER = os.path.realpath(sys.executable)
"""Python interpreter that runs programs: this one, without its virtual environment."""
_PREFIX = os.path.realpath(sys.base_prefix)


@dataclass(frozen=True)
class Cell:
    """The walls of a jailed process, its folder, and what it may use.

    Attributes:
        walls: names of the walls that are put up, out of ``WALLS``.
        folder: path of its empty folder.
        cpu_seconds: processor seconds, rounded up to whole ones.
        memory_bytes: address space.
        file_bytes: size of one file.
        folder_bytes: size of the whole folder; holds behind ``namespaces`` only.
    """

    walls: frozenset[str]
    folder: str
    cpu_seconds: float
    memory_bytes: int
    file_bytes: int = 16 << 20
    folder_bytes: int = 64 << 20


def enter_namespaces() -> None:
    """Enter new namespaces, in the watcher: its next child is the first process in them. The mount namespace is made by
    that child, in ``put_up``."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # no CAP_SYS_ADMIN, as in a container: a user namespace may be allowed
            kernel.unshare(_NAMESPACES)
            return
    user = os.geteuid()
    group = os.getegid()
    kernel.unshare(_NAMESPACES | kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def job_user(job: int) -> int:
    """Return a user id that no other running job has, so that the kernel can count and find its processes. ``job``: pid
    of its watcher."""
    return 1_000_000_000 + job % 100_000_000


def become(user: int) -> None:
    """Change this process to the user and group of that number; to ``nobody`` if a container does not map it."""
    os.setgroups([])
    try:
        _set_ids(user)
    except OSError:
        _set_ids(_NOBODY)


def _set_ids(number: int) -> None:
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def put_up(cell: Cell, job: int) -> None:
    """Put up the walls of ``cell`` around this process, right before its task; from then on it dies with its parent.
    ``job``: see ``job_user``. Raises ``OSError`` if a wall cannot be put up."""
    walls = cell.walls
    folder = cell.folder
    if "namespaces" in walls:
        kernel.unshare(kernel.CLONE_NEWNS)  # not earlier: a new root applies to every process of the namespace
        _enter_view(cell.folder_bytes)
        folder = INSIDE
    else:
        os.chdir(folder)
    processes: int | None = None
    if {"namespaces", "user"} & walls:  # else the limit would count other processes of this user
        processes = _THREADS if "seccomp" in walls else _PROCESSES
    _limit(cell, processes)
    if "user" in walls:
        become(job_user(job))
    elif "namespaces" in walls:
        _set_ids(1000)
    if kernel.known_machine():
        kernel.give_up_rights()
    if "landlock" in walls:
        kernel.give_up_files_but([one for one in _readable() if os.path.exists(one)], [folder, "/dev/null"])
    kernel.die_with_parent(signal.SIGKILL)  # a change of user takes it back, and the filter allows no more of it
    if "seccomp" in walls:
        kernel.install_filter(seccomp_filter(os.getpid(), view="namespaces" in walls))


def _limit(cell: Cell, processes: int | None) -> None:
    """Set the resource limits of this process, with at most ``processes`` processes and threads (None: as before), and
    reset its signal handlers."""
    cpu_seconds = max(1, math.ceil(cell.cpu_seconds))
    wanted = {
        resource.RLIMIT_CPU: cpu_seconds + 1,
        resource.RLIMIT_AS: cell.memory_bytes,
        resource.RLIMIT_FSIZE: cell.file_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
    for which, most in wanted.items():
        hard = resource.getrlimit(which)[1]
        if hard == resource.RLIM_INFINITY:
            allowed = most
        else:
            allowed = min(most, hard)
        resource.setrlimit(which, (allowed, allowed))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_seconds, hard), hard))  # SIGXCPU at its limit, then SIGKILL
    for number in {*range(1, signal.NSIG)} - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's way: a file that grows too large is an error there
        signal.signal(number, signal.SIG_IGN)


def _readable() -> list[str]:
    """Return the paths that can be read in a jail: the system's libraries, Python and a few devices. Symbolic links are
    not resolved."""
    inside = any(place == _PREFIX or _PREFIX.startswith(place + "/") for place in _SYSTEM.split())
    places = [place for place in _SYSTEM.split() if os.path.lexists(place)] + ([] if inside else [_PREFIX])
    return places + [place for place in _DEVICES.split() if os.path.exists(place)]


def _enter_view(folder_bytes: int) -> None:
    """Replace this process's file system by a view of the readable paths and an empty ``/tmp`` of ``folder_bytes``. The
    process needs its own mount namespace and the right to mount."""
    new = tempfile.gettempdir()
    wanted = _readable()
    sources = {place: os.open(place, os.O_PATH | os.O_CLOEXEC) for place in wanted if not os.path.islink(place)}
    links = {place: os.readlink(place) for place in wanted if os.path.islink(place)}
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", new, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for place, source in sources.items():
        target = new + place
        is_folder = stat.S_ISDIR(os.fstat(source).st_mode)
        os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
        if not is_folder:
            os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))
        kernel.mount(f"/proc/self/fd/{source}", target, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(source)
        # devices too: they can be written to all the same
        kernel.make_read_only(target, below=True)
    for place, end in links.items():
        os.makedirs(os.path.dirname(new + place), exist_ok=True)
        os.symlink(end, new + place)
    os.makedirs(new + INSIDE, exist_ok=True)
    options = f"size={folder_bytes},nr_inodes=4096,mode=1777"
    kernel.mount("tmpfs", new + INSIDE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.pivot_into(new)
    kernel.make_read_only("/", below=False)
    os.chdir(INSIDE)
