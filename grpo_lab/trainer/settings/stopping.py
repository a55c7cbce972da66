"""``max_hours`` and ``stop_file``: what they may be."""

from __future__ import annotations

import math
import os
from typing import Any


def max_hours(written: Any) -> float | None:
    """Hours, more than 0; ``None`` without a limit; digits are a number (command lines).

    Raises:
        ValueError: anything else.
    """
    if written is None:
        return None
    try:
        hours = math.nan if isinstance(written, bool) else float(written)
    except (TypeError, ValueError):
        hours = math.nan
    if not 0 < hours < math.inf:
        raise ValueError(f"`max_hours` is {written!r}; it must be a number of hours above 0, or left out")
    return hours


def stop_file(written: Any) -> str | None:
    """The path of a file, there or not; ``None``: ``STOP`` in ``output_dir``.

    Raises:
        ValueError: no path, or the path of a folder, which is always there.
    """
    if written is None:
        return None
    if not isinstance(written, str | os.PathLike) or not os.fspath(written) or os.path.isdir(written):
        seen = f"{written!r}, a folder" if isinstance(written, str) and written else repr(written)
        raise ValueError(
            f"`stop_file` is {seen}; it must be the path of a file, there or not yet, or left out (STOP in `output_dir`)"
        )
    return os.fspath(written)


__all__ = ["max_hours", "stop_file"]
