"""Files that are there whole or not at all: a reader never meets half of one, wherever the writer was killed or the power cut.

Written beside its place, brought to the disk, moved into place, and the move brought to the disk, too. Without the first
``fsync`` a file system may carry out the move before the content; without the second the move itself may be lost.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """``path`` as ``write(partial)`` makes it, or as it was.

    Args:
        write: writes the file that it is given, which lies beside ``path`` as ``<name>.part``.

    Raises:
        OSError: the file, or its folder, cannot be written. What ``write`` raises comes through.
    """
    place = Path(path)
    partial = place.with_name(f"{place.name}.part")
    write(partial)
    _to_disk(partial)
    os.replace(partial, place)
    _to_disk(place.parent)


def write_whole_text(path: str | os.PathLike[str], text: str) -> None:
    """``text`` as UTF-8."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def _to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # some network file systems know no fsync of a folder: there a move is on the server when it returns
    finally:
        os.close(opened)


__all__ = ["write_whole", "write_whole_text"]
