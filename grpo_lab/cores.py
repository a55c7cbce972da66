"""How many cores this process may use."""

from __future__ import annotations

import os


def own_cores() -> int:
    """Those that it is bound to (containers, ``taskset``), where the system says so; all of the machine elsewhere."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["own_cores"]
