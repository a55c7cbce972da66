"""Writing files that are there completely or not at all, wherever the writer was killed or the power cut.

A file is written beside its place, flushed to the disk, and moved into place; then the move is flushed, too. Without
the first ``fsync`` a file system may carry out the move before it has written the content. Without the second it may
lose the move.

Files of JSON lines grow by batches. A batch, too, is there completely or not at all: what a kill left of one is cut off
before the next is appended (``append_json_line``, ``append_rows``).

Three small things are here as well: whether a name is a local folder or one on the hub, whether a local folder holds a
model, and how many cores this process may use. Files are read by ``grpo_lab.reading``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

LEFT = "left"
"""Key in a JSON line: the number of lines of its batch that follow. The last line of a batch does not have it, nor does
a line that is appended alone."""

EXIT_INTERRUPTED = 75
"""Exit code of a command that stopped on request and can be resumed (EX_TEMPFAIL). It is not 0, since the command is
not finished."""
LOCKED_WITHIN_S = 5.0
"""Seconds within which a process locks a file or folder that it makes. An older one without a lock is abandoned."""
#: Errors of a disk that takes nothing more: it is full, over a quota or limit, read-only or broken.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Write a file completely or not at all: ``write(partial)`` writes ``<name>.part`` beside ``path``, which is then
    moved to ``path``. After a failure ``path`` is as it was.

    Raises:
        OSError: the disk refused to take the file (``saving``), or ``path`` is a folder. Other errors of ``write`` pass
            through.
    """
    place = Path(path)
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(place))
    partial = place.with_name(f"{place.name}.part")
    partial.unlink(missing_ok=True)
    os.close(no_link(str(partial), os.O_WRONLY | os.O_CREAT))
    with saving(place):
        write(partial)
        _to_disk(partial)
    os.replace(partial, place)
    _to_disk(place.parent)


@contextmanager
def saving(place: str | os.PathLike[str]) -> Iterator[None]:
    """Context for writing ``place``. An error of the disk inside it (full, over a quota, read-only) becomes an OSError
    that has the error number and names ``place``; other errors pass through.

    For a full disk safetensors, tokenizers, torch and ``copytree`` raise errors of their own, and that of ``json.dump``
    names no file.
    """
    try:
        yield
    except Exception as error:
        fault = _of_disk(error)
        if fault is None:
            raise
        number, why = fault
        raise OSError(number, why, str(place)) from error


def _of_disk(error: Exception) -> tuple[int, str] | None:
    """Return the error number and message of an error that means that the disk refused a write. None for other errors,
    and for an OSError that names its file already."""
    kind = type(error)
    said = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        known = error.errno in NO_ROOM and error.filename is None
        if known:
            return (error.errno, os.strerror(error.errno))
        return None
    if kind is RuntimeError and ("inline_container" in said or "PytorchStreamWriter" in said):
        return errno.EIO, "torch could not write a file to its end"  # it does not know why
    tells = kind is Exception or kind.__name__ == "SafetensorError" or isinstance(error, shutil.Error)
    found = _NUMBER.search(said) if tells else None
    if found is None:
        return None
    number = int(found[1] or found[2])
    return number, os.strerror(number)


def write_whole_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8, completely or not at all."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as JSON, completely or not at all. A value whose type JSON lacks is written as ``str`` of it."""
    write_whole_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_json_lines(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write each row as a JSON object on a line of its own, completely or not at all. Other characters than ASCII are
    not escaped, so the caller must have replaced lone surrogates (``visible.encodable``)."""
    write_lines(path, (as_line(row) for row in rows))


def as_line(row: Mapping[str, Any]) -> str:
    """Return a row as `write_json_lines` writes it, without the line's end."""
    return json.dumps(row, ensure_ascii=False, default=str)


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write lines of text, completely or not at all. ``lines`` may be a generator of more than fits in memory."""

    def write(partial: Path) -> None:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    write_whole(path, write)


def append_json_line(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Append ``row`` as a line to a file of JSON lines, after its last complete line. A value of a type that JSON lacks
    is written as ``str`` of it.

    Raises:
        OSError: the line cannot be written; the file is as it was.
        ValueError: ``path`` is no plain file (``no_link``).
    """
    with open(path, "a+b", opener=no_link) as file:
        cut_to_whole_batches(file)
        append_batch(file, [json.dumps(row, default=str)])


def append_rows(file: IO[bytes], rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows as one batch of JSON lines, all but the last with ``LEFT``, and flush them to the disk."""
    last = len(rows) - 1
    marked = [row if place == last else {**row, LEFT: last - place} for place, row in enumerate(rows)]
    append_batch(file, [json.dumps(row) for row in marked])
    os.fsync(file.fileno())


def append_batch(file: IO[bytes], lines: Sequence[str]) -> None:
    """Append lines to an open file that ends with a complete batch. If the disk refuses them, cut the file back to
    where it ended, and raise OSError.

    After a kill in the middle, whoever opens the file next cuts it back (``cut_to_whole_batches``).
    """
    end = file.seek(0, os.SEEK_END)
    content = memoryview("".join(f"{line}\n" for line in lines).encode())
    try:
        with saving(file.name):
            while content:  # past Python's buffer, which would try a failed write again
                content = content[os.write(file.fileno(), content) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise


def cut_to_whole_batches(file: IO[bytes], is_whole: Callable[[dict[str, Any]], bool] = lambda row: True) -> None:
    """Cut an open file of JSON lines after its last complete batch, and move to its end.

    This removes what a kill or a lost write left there: half a line, a line that holds no object or one for which
    ``is_whole`` is false, or a batch without its last line.
    """
    end = file.seek(0, os.SEEK_END)
    size = end
    while end:
        start = _start_of_line(file, end)
        file.seek(start)
        if _ends_batch(file.read(end - start), is_whole):
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(0, os.SEEK_END)


def _start_of_line(file: IO[bytes], end: int) -> int:
    """Return the position (in bytes) at which the line begins that ends at position ``end``."""
    place = end - 1
    while place > 0:
        piece = max(0, place - 65536)
        file.seek(piece)
        newline = file.read(place - piece).rfind(b"\n")
        if newline >= 0:
            return piece + newline + 1
        place = piece
    return 0


def _ends_batch(line: bytes, is_whole: Callable[[dict[str, Any]], bool]) -> bool:
    """Return whether ``line`` is complete, holds an object that ``is_whole``, and is the last of its batch."""
    try:
        row = None
        if line.endswith(b"\n"):
            row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and LEFT not in row and is_whole(row)


def no_link(path: str, flags: int) -> int:
    """Open a plain file and return its descriptor, without following links: ``open(…, opener=no_link)``.

    Raises:
        ValueError: ``path`` is a link, a folder, a pipe or a device.
    """
    try:
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if stat.S_ISREG(os.fstat(opened).st_mode):
            return opened
        os.close(opened)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise ValueError(f"{path} is a link or no plain file, and this run would write through it; remove it")


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context that yields an empty folder to fill, ``<name>.part`` beside ``path``, and moves it to ``path`` at the
    end.

    An earlier folder ``path`` is replaced. For a moment there may then be no ``path``, but never half of one. If the
    block raises, ``path`` and the half-filled folder stay as they are; the next call removes the latter.
    """
    place = Path(path)
    partial = place.with_name(f"{place.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with saving(place):
        yield partial
        move_whole(partial, place)


def move_whole(partial: Path, place: Path) -> None:
    """Flush the folder ``partial`` to the disk and move it to ``place``. An earlier folder ``place`` is moved aside
    first, and removed last."""
    for inside in (*partial.rglob("*"), partial):
        _to_disk(inside)
    earlier = partial.with_name(f"{partial.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if place.exists():
        os.replace(place, earlier)
    os.replace(partial, place)
    _to_disk(place.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Wait until the system has written a file, or a folder's list of names, to the disk (``fsync``)."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # some network file systems know no fsync of a folder: there a move is on the server when it returns
    finally:
        os.close(opened)


def own_cores() -> int:
    """Return the number of cores that this process may use (a container or ``taskset`` may allow fewer than there are);
    that of the machine if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_local(path: str | None) -> bool:
    """Return whether ``path``, of a model or data set, is a local folder and not a hub name."""
    return bool(path) and Path(str(path)).is_dir()


def looks_local(path: str) -> bool:
    """Return whether ``path`` cannot be a hub name (``owner/name``), since it begins like a path or has two slashes."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def check_place(path: str, where: str = "model.path") -> str:
    """Return ``path`` if it can be a model: a folder that holds one, or a hub name (which is not looked up).

    Raises:
        ValueError: no such folder, or one without a model. The message names the setting ``where``.
    """
    if not is_local(path):
        if not path or looks_local(path):
            raise ValueError(f"`{where}` is {path!r}: no such folder (a saved model, or a hub name such as org/model)")
    elif not any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json")):
        said = "the folder holds no model (neither config.json nor adapter_config.json)"
        raise ValueError(f"`{where}` is {path!r}: {said}")
    return path
