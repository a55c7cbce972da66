"""Sections one after the other within a time budget: a section that fails, is missing or does not fit says so, and the
others go on."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """``tiny``: models that a CPU trains in a second. ``deadline``: on ``time.monotonic()``'s clock. ``folder``:
    scratch."""

    tiny: bool
    device: str
    deadline: float
    folder: Path

    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class Section:
    """``seconds``: what it takes at most on an H100, guessed; ``tiny_seconds``: in its tiny form on two CPU cores.

    ``apart``: in a process of its own, because what it starts (an engine, a process group) is not given back while the
    process lives. ``needs``: packages without which there is nothing to measure. ``gpu_only``: why a CPU cannot run it.
    """

    name: str
    run: Callable[[Setting], list[Row]]
    seconds: float
    tiny_seconds: float
    apart: bool = False
    needs: tuple[str, ...] = ()
    gpu_only: str | None = None


def run_all(
    sections: Sequence[Section], setting: Setting, here: bool, told: Callable[[str], None]
) -> dict[str, Outcome]:
    """name → outcome: ``status`` (ok, failed, skipped, not installed), ``seconds``, ``rows``, and ``error`` or
    ``reason``.

    ``here``: in this process whatever a section asks for (the process that was started for one is such a place).
    """
    outcomes: dict[str, Outcome] = {}
    for section in sections:
        began = time.monotonic()
        outcomes[section.name] = outcome = run_one(section, setting, here)
        outcome["seconds"] = round(time.monotonic() - began, 1)
        why = outcome.get("reason") or (outcome.get("error") or {}).get("message", "")
        told(f"{section.name}: {outcome['status']} ({outcome['seconds']} s) {why}".rstrip())
        free_memory()
    return outcomes


def run_one(section: Section, setting: Setting, here: bool) -> Outcome:
    missing = [package for package in section.needs if find_spec(package) is None]
    if missing:
        return {"status": "not installed", "rows": [], "reason": f"{', '.join(missing)} not installed"}
    if section.gpu_only and not setting.gpu:
        return {"status": "skipped", "rows": [], "reason": section.gpu_only}
    needed, left = section.tiny_seconds if setting.tiny else section.seconds, setting.left()
    if needed > left:
        reason = f"needs about {needed:.0f} s, {max(left, 0):.0f} s of the budget are left"
        return {"status": "skipped", "rows": [], "reason": reason}
    try:
        return in_a_process(section, setting) if section.apart and not here else judged(section.run(setting))
    except Exception as error:
        return failure(error)


def judged(rows: list[Row]) -> Outcome:
    """failed where a row says so: ``pass`` is False, or it has an ``error``."""
    bad = [row for row in rows if row.get("pass") is False or "error" in row]
    outcome: Outcome = {"status": "failed" if bad else "ok", "rows": rows}
    if bad:
        outcome["error"] = {
            "type": "row",
            "message": f"{len(bad)} of {len(rows)} rows: {bad[0].get('error', 'outside its tolerance')}",
        }
    return outcome


def failure(error: BaseException) -> Outcome:
    where = "".join(traceback.format_exception(error))[-8000:]
    lines = str(error).strip().splitlines()
    told = {"type": type(error).__name__, "message": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}
    return {"status": "failed", "rows": [], "error": told | {"traceback": where}}


def in_a_process(section: Section, setting: Setting) -> Outcome:
    """The section alone in a new process, which is ended with all that it started at the deadline."""
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        answer, left = Path(folder) / "answer.json", setting.left()
        command = [
            sys.executable, str(Path(__file__).parents[1] / "gpu_check.py"), "--only", section.name, "--here",
            "--output", str(answer), "--budget", f"{left:.0f}", *(["--tiny"] if setting.tiny else []),
        ]  # fmt: skip
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            said, _ = started.communicate(timeout=max(left, 1))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done after the {left:.0f} s that were left of the budget") from None
        finally:
            end_group(started)
        if not answer.is_file():
            raise RuntimeError(
                f"its process ended with code {started.returncode} and no answer; its last words: {said[-1500:]}"
            )
        outcome: Outcome = json.loads(answer.read_text())["sections"][section.name]
        return outcome


def end_group(started: subprocess.Popen[str]) -> None:
    """Ends the process and all that it started: a launcher's workers have sessions, and so groups, of their own."""
    import psutil

    try:
        family = [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    started.wait()


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
