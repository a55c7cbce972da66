"""Where this process is: in words (``at``), and in lines of code. No collective, no clock but this process's own.

The places are those of the thread that trains. An error of torch's that means "the others did not come" leaves a place
as ``RankLost``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: what gloo, NCCL and torch's stores say when a limit has passed
LATE = ("Timed out waiting", "Application timeout caused pair closure", "collective operation timeout")
#: and when the other end is no more
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
#: one of these stands in each such message: other errors say "Broken pipe", too
OF_TORCH = ("gloo", "NCCL", "ProcessGroup", "TCPStore", "c10d")
#: files in which nobody's own work stands: the innermost line outside of them is where a process is
_MACHINERY = (
    "/torch/",
    "/accelerate/",
    "/threading.py",
    "/concurrent/futures/",
    "/asyncio/",
    "/contextlib.py",
    "/selectors.py",
)

_places: list[str] = []
_changed = time.monotonic()
#: makes the message of a ``RankLost``; ``watch.RankWatch`` puts one here that knows the other ranks
_describe: list[Callable[[str, str], str]] = []


class RankLost(RuntimeError):
    """A collective ended without the others: one of them did not come within the time limit, or has ended."""


@contextmanager
def at(name: str) -> Iterator[None]:
    """This process is at ``name`` (within the place where it was); also a decorator.

    Raises:
        RankLost: for torch's error of a collective that passed its time limit or lost its other end.
    """
    global _changed
    _places.append(name)
    _changed = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        kind = how_it_broke(error)
        if kind is None:
            raise
        raise RankLost(_message(kind, str(error))) from error
    finally:
        _places.pop()
        _changed = time.monotonic()


def how_it_broke(error: RuntimeError) -> str | None:
    """``late``: the time limit passed; ``gone``: the other end closed; None for any other error, and for one already
    told."""
    text = str(error)
    if isinstance(error, RankLost) or not any(word in text for word in OF_TORCH):
        return None
    if any(said in text for said in LATE):
        return "late"
    return "gone" if any(said in text for said in GONE) else None


def is_of_lost_rank(error: Exception) -> bool:
    """Whether it says that a collective ended without the others, told or not."""
    return isinstance(error, RankLost) or (isinstance(error, RuntimeError) and how_it_broke(error) is not None)


def place() -> str:
    """Outermost first; empty outside of all places."""
    return " › ".join(_places)


def seconds_here() -> float:
    """Since the last time that a place was entered or left."""
    return time.monotonic() - _changed


def line_of(thread: int) -> tuple[str, bool]:
    """The innermost line of a thread that is somebody's own work, and whether it waits inside of
    ``torch.distributed``."""
    frame: FrameType | None = sys._current_frames().get(thread)
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        waits |= "/torch/distributed/" in file
        if not any(part in file for part in _MACHINERY):
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}", waits
        frame = frame.f_back
    return "an unknown line", waits


def _message(kind: str, said: str) -> str:
    if _describe:
        return _describe[-1](kind, said)
    what = "waited in vain for another rank" if kind == "late" else "lost the connection to another rank"
    return f"this rank {what} at «{place()}» (time limit: `ddp_timeout`). torch says: {said}"
