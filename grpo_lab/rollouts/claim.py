"""One run at a time on a server: whose weights it holds, and whether that run still lives.

A second trainer would replace the first one's weights at its next sync, and both would end. So a run claims the server before it
sends anything, and again at every sync. On one machine a claim lives as long as the process that made it; from another
machine, where that cannot be seen, for `PATIENCE` seconds after its last sign.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATIENCE = 900.0


def this_run(folder: str) -> dict[str, Any]:
    """Who claims: this process, where it runs, and the folder it writes to (for the message only)."""
    pid = os.getpid()
    return {"pid": pid, "started": started_at(pid), "place": place(), "host": platform.node(), "folder": folder}


def place() -> str:
    """The same for two processes exactly where one can see the other in /proc; "" where there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def started_at(pid: int) -> str:
    """When a process started, in ticks since boot, so that a number used again is not taken for it; "" for none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True for two claims of one process."""
    return all(one[name] == other[name] for name in ("pid", "started", "place", "host"))


def lives(owner: Mapping[str, Any], last_sign: float) -> bool:
    """Whether the run that made a claim may still be there. `last_sign`: seconds of `time.monotonic` of this process."""
    if owner["place"] and owner["place"] == place():
        return bool(owner["started"]) and started_at(int(owner["pid"])) == owner["started"]
    return time.monotonic() - last_sign < PATIENCE


def taken(url: str, owner: Mapping[str, Any], seconds: float) -> str:
    """The sentence that the second trainer ends with."""
    return (
        f"the vLLM server at {url} is in use by another run: process {owner['pid']} on {owner['host']}, writing to "
        f"{owner['folder']!r}, heard of {seconds:.0f} s ago. Two runs would replace each other's weights: end that one, or start "
        "a second server (`grpo-lab serve --port …`)"
    )
