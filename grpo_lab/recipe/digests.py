"""Digests of files. A file is read again only if its size or its modification time differs."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Seen = dict[str, list[Any]]
"""File → its size in bytes, its modification time in nanoseconds, its digest. JSON can hold it."""
KNOWN: dict[str, tuple[int, int, str]] = {}
"""The same, by absolute path, for each file whose digest this process knows."""
_A_TICK = 50_000_000
"""Nanoseconds within which a file system may give two changes the same time. The digest of a file that changed so
recently is not remembered."""


def file_digest(file: Path) -> str:
    """Return the digest of ``file``: 16 hexadecimal digits of its SHA-256."""
    name = os.path.abspath(file)
    found = file.stat()
    stamp = (found.st_size, found.st_mtime_ns)
    known = KNOWN.get(name)
    if known is not None and known[:2] == stamp:
        return known[2]
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    if time.time_ns() - found.st_mtime_ns > _A_TICK:
        KNOWN[name] = (*stamp, digest)
    return digest


def seen(files: Iterable[Path], folder: Path | None = None) -> Seen:
    """Return size, modification time and digest of each file. Names are paths within ``folder``; without a folder they
    are absolute paths."""
    found: Seen = {}
    for file in files:
        stat = file.stat()
        if folder is None:
            name = os.path.abspath(file)
        else:
            name = file.relative_to(folder).as_posix()
        found[name] = [stat.st_size, stat.st_mtime_ns, file_digest(file)]
    return found


def remember(files: Mapping[str, Any], folder: Path = Path()) -> None:
    """Take over what ``seen`` returned in an earlier process, so that unchanged files are not read again. Malformed
    entries are skipped."""
    for name, one in files.items():
        if isinstance(one, list) and len(one) == 3:
            KNOWN.setdefault(os.path.abspath(folder / name), (one[0], one[1], str(one[2])))


def is_as_seen(file: Path, then: Any) -> bool:
    """Return whether ``file``, which must exist, still has the content that it had when ``seen`` returned ``then`` for
    it."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns] == then[:2] or (stat.st_size == then[0] and file_digest(file) == then[2])
