"""Files that a server keeps outside of run folders: its token, and temporary folders.

Whoever has the token can read prompts and replace the model, so it is in no log, no command line and no run folder.
Server and trainer both take it from the first of these that there is:

    1. the file that was named (`grpo-lab serve --token-file`, `rollout.server.token_file`)
    2. `GRPO_LAB_SERVER_TOKEN` in the environment (between machines: the same in both jobs)
    3. the file of that address, below `~/.local/state/grpo_lab/tokens`: made by a server, removed at its end

A file that was named is not removed: another server may use the same one.

Each file and folder is locked by its process. The kernel releases the lock when the process ends, also by a kill, so
that the next process recognises what was left behind, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from grpo_lab.io import LOCKED_WITHIN_S

VARIABLE = "GRPO_LAB_SERVER_TOKEN"
#: Names of the other environment variables that a server's guard reads.
HOSTS_VARIABLE = "GRPO_LAB_SERVER_HOSTS"
LIMIT_VARIABLE = "GRPO_LAB_SERVER_MAX_BYTES"
#: Names of this machine for itself. TRL uses 0.0.0.0 where no address is set.
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
#: Least number of characters of a token that the server did not make. Its own have 43 (256 random bits).
SHORTEST = 20


@dataclass(frozen=True)
class AccessToken:
    """A token and the file that holds it, None if it came from the environment. `made`: whether this process made the
    file, and so removes it at the end."""

    value: str = field(repr=False)
    file: Path | None = None
    made: bool = False

    def forget(self) -> None:
        """Remove the file if this process made it, unless another server has written its own token there since."""
        if self.made and self.file is not None:
            with contextlib.suppress(OSError, ValueError):  # gone, or no longer ours
                if read(self.file) == self.value:
                    self.file.unlink()


class Bearer:
    """Token authentication for `requests`; unlike a header of the session it takes precedence over a `~/.netrc`."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def token_of(session: Any) -> str | None:
    """Return the token that a `requests.Session` sends, None if it sends none."""
    found = getattr(session, "auth", None)
    if isinstance(found, Bearer):
        return found._token
    return None


def tokens_folder() -> Path:
    """Return the folder of the token files that servers make."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "grpo_lab" / "tokens"


def default_file(base_url: str) -> Path:
    """Return the token file of the server at an address. All local addresses (`LOCAL_NAMES`) share one file per port,
    which has this machine's name."""
    url = urlparse(base_url)
    host = url.hostname or ""
    if host in LOCAL_NAMES:
        name = f"local-{platform.node()}"
    else:
        name = host.replace(":", "-")
    return tokens_folder() / f"{name}-{url.port or 80}.token"


def of_server(base_url: str, named: Path | None) -> AccessToken:
    """Return the token for a server that is about to start; make one if there is none.

    Args:
        base_url: address of the server. The process must hold it (`server.held_address`), since the token file of that
            address is replaced.
        named: the file that was named, which is made if it is missing; None: none was named.

    Raises:
        ValueError: the token is too short, or not plain text.
        OSError: its file cannot be written.
    """
    if named is not None:
        with contextlib.suppress(FileExistsError):  # then that file's token is used
            write(named, secrets.token_urlsafe(32), anew=True)
        found = read(named)
    elif os.environ.get(VARIABLE):
        found = plain(os.environ[VARIABLE], VARIABLE)
    else:
        file = default_file(base_url)
        remove_left(tokens_folder(), f"local-{platform.node()}-*.token")
        made = secrets.token_urlsafe(32)
        write(file, made)
        return AccessToken(made, file, made=True)
    if len(found) < SHORTEST:
        raise ValueError(
            f"the server's token ({named or VARIABLE}) has {len(found)} characters; a server asks for {SHORTEST} or "
            "more (python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )
    return AccessToken(found, named)


def of_trainer(base_url: str, named: str | None) -> str | None:
    """Return the token with which to talk to the server at an address. ``named``: the token file that was named, if one
    was. None: there is no token yet, or the server is none of `grpo-lab serve`. Raises ValueError if others can read
    the file."""
    if named is None and (found := os.environ.get(VARIABLE)):
        return plain(found, VARIABLE)
    if named is None:
        file = default_file(base_url)
    else:
        file = Path(named).expanduser()
    if file.is_file():
        return read(file)
    return None


def write(file: Path, token: str, *, anew: bool = False) -> None:
    """Write `token` into `file` with mode 0600, and lock the file; make a missing folder with mode 0700.

    Raises:
        ValueError: others can write to the folder.
        FileExistsError: the file exists, and `anew` says that it must be new.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = file.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{file.parent} can be written by others: name a --token-file elsewhere")
    if file.parent == tokens_folder():
        file.parent.chmod(0o700)
    opened, partial = tempfile.mkstemp(dir=file.parent, prefix=".token-")  # mode 0600
    try:
        with os.fdopen(opened, "w", encoding="ascii") as text:
            text.write(token + "\n")
        with contextlib.suppress(OSError):  # a file system without locks
            hold(partial)  # as long as this process lives
        if anew:
            os.link(partial, file)
        else:
            os.replace(partial, file)
    finally:
        Path(partial).unlink(missing_ok=True)


def read(file: Path) -> str:
    """Read the token in a file. Raises ValueError if it is no regular file, if others can read it too, or if the token
    is not plain text."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"the token file {file} is no file")  # reading a pipe would block
    with file.open("rb") as text:
        found = os.fstat(text.fileno())
        if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"the token file {file} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}: it must be"
                f" yours and readable by you alone (chmod 600 {file})"
            )
        return plain(text.read(4096).decode("ascii", "replace").strip(), str(file))


def plain(token: str, where: str) -> str:
    """Return the token if it can be sent in a header. Raises ValueError otherwise, without the token in the message."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"the token in {where} must be printable ASCII without spaces, and not empty")
    return token


@contextlib.contextmanager
def own_folder(prefix: str, parent: str | Path | None) -> Iterator[Path]:
    """Make a folder in ``parent`` (None: the temporary folder) that only this user may enter, with a name that begins
    with ``prefix``, and lock it; remove it after the block. Folders that killed processes left are removed, too."""
    remove_left(Path(parent or tempfile.gettempdir()), f"{prefix}{'[a-z0-9_]' * 8}")
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    held = hold(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def hold(path: str | Path) -> int:
    """Lock a file or folder until the returned descriptor is closed. Raises OSError if another process has it
    locked."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def remove_left(parent: Path, pattern: str) -> None:
    """Remove the files and folders of this user in ``parent`` that match ``pattern`` and that no process has locked.
    One that was changed less than ``LOCKED_WITHIN_S`` seconds ago stays: its process may be about to lock it."""
    for place in parent.glob(pattern):
        with contextlib.suppress(OSError):
            found = place.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_ctime > LOCKED_WITHIN_S:
                held = hold(place)
                if place.is_dir():
                    shutil.rmtree(place, ignore_errors=True)
                else:
                    place.unlink()
                os.close(held)
