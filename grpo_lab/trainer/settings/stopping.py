"""``max_hours``: what it may be."""

from __future__ import annotations

import math
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


__all__ = ["max_hours"]
