"""The file system that a jailed process sees: Python and the system's libraries read-only, an empty ``/tmp``, nothing else."""

from __future__ import annotations

import os
import stat
import sys
import tempfile

from grpo_lab.sandbox import kernel

_SYSTEM = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
INSIDE = "/tmp"
"""Where the empty folder is, inside."""


INTERPRETER = os.path.realpath(sys.executable)
"""The program that runs programs: this Python, without its virtual environment."""
_PREFIX = os.path.realpath(sys.base_prefix)


def readable() -> list[str]:
    """What can be read inside. Links stay links."""
    inside = any(place == _PREFIX or _PREFIX.startswith(place + "/") for place in _SYSTEM)
    return [place for place in _SYSTEM if os.path.lexists(place)] + ([] if inside else [_PREFIX])


def devices() -> list[str]:
    return [place for place in _DEVICES if os.path.exists(place)]


def enter(folder_bytes: int) -> None:
    """Make the view this process's whole file system. In a mount namespace of its own, with the right to mount."""
    new = tempfile.gettempdir()
    wanted = [*readable(), *devices()]
    sources = {place: os.open(place, os.O_PATH | os.O_CLOEXEC) for place in wanted if not os.path.islink(place)}
    links = {place: os.readlink(place) for place in wanted if os.path.islink(place)}
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", new, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for place, source in sources.items():
        target = new + place
        _make_place(target, folder=stat.S_ISDIR(os.fstat(source).st_mode))
        kernel.mount(f"/proc/self/fd/{source}", target, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(source)
        kernel.make_read_only(
            target, below=True
        )  # of a device too: what is written into it is no change of the file system
    for place, end in links.items():
        os.makedirs(os.path.dirname(new + place), exist_ok=True)
        os.symlink(end, new + place)
    os.makedirs(new + INSIDE, exist_ok=True)
    options = f"size={folder_bytes},nr_inodes=4096,mode=1777"
    kernel.mount("tmpfs", new + INSIDE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.pivot_into(new)
    kernel.make_read_only("/", below=False)
    os.chdir(INSIDE)


def _make_place(target: str, *, folder: bool) -> None:
    os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
    if not folder:
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))
