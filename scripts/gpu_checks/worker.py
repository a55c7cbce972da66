"""What happens in a section's process: it imports, says so, waits until it is asked, and writes each row at once."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_checks.section import Outcome, Section, Setting
from grpo_lab.sandbox.kernel import die_with_parent

#: environment variable that says to which section a process belongs
MARK = "GPU_CHECK_SECTION"


def work(section: Section, setting: Setting, gate: Connection) -> None:
    """Run a section in this process, which then ends. Over ``gate`` it sends "ready" after its imports, and gets the
    seconds of its limit, which count from then on."""
    die_with_parent(signal.SIGKILL)
    os.setsid()
    answer = answer_file(setting)
    into_log(setting)
    try:
        surroundings(setting, section)
        function = section.begins(setting)
        gate.send("ready")
        limit = gate.recv()
        began = dataclasses.replace(setting, deadline=time.monotonic() + limit)
        with answer.open("a") as file:
            for row in function(began):
                say(file, {"row": row})
        ended: dict[str, Any] = {"end": "ok"}
    except BaseException as error:
        ended = failure(error)
    with answer.open("a") as file:
        say(file, ended)
    sys.stdout.flush()
    os._exit(0)  # an engine's threads race with the interpreter's teardown


def answer_file(setting: Setting) -> Path:
    """Return the file with a section's rows and how it ended, a line of JSON each."""
    return setting.own / "answer.jsonl"


def say(file: Any, line: dict[str, Any]) -> None:
    """Write a line of the answer file at once."""
    file.write(json.dumps(line, default=str) + "\n")
    file.flush()


def into_log(setting: Setting) -> None:
    """Send everything that this process prints into the section's log."""
    log = os.open(setting.own / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  it lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def surroundings(setting: Setting, section: Section) -> None:
    """Set what processes side by side must not share (ports, cores, folders), and what a machine without a network
    needs."""
    from ports import free_port

    os.environ[MARK] = str(setting.own)
    os.environ["MASTER_PORT"] = str(free_port())  # two engines on one port would wait for each other
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["TMPDIR"] = str(setting.own)
    import tempfile

    if setting.cores:
        os.sched_setaffinity(0, setting.cores)
    if setting.cores or not section.timed:
        threads = len(setting.cores) or section.keeps_busy(setting)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
    tempfile.tempdir = None  # TMPDIR is read anew; a killed section leaves nothing elsewhere


def failure(error: BaseException) -> dict[str, Any]:
    """Return the last line of the answer file for an error: its type and first line, and the traceback. A TimeoutError
    means that the section has ended itself at its limit; any other error that it broke."""
    said = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {said[0] if said else ''}"[:300]
    status = "limit" if isinstance(error, TimeoutError) else "broke"
    return {"end": status, "reason": message, "traceback": "".join(traceback.format_exception(error))[-8000:]}


def outcome_of(setting: Setting, how: str | None = None) -> Outcome:
    """Return a section's outcome from what its process has left. ``how``: how the runner ended the process, in words;
    None if it did not. If the process has not written how it ended, somebody else killed it."""
    rows: list[dict[str, Any]] = []
    ended: dict[str, Any] = {}
    file = answer_file(setting)
    for text in file.read_text().splitlines() if file.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            break  # the line at which it was killed
        if "row" in line:
            rows.append(line["row"])
        else:
            ended = line
    if not ended:
        reason = how or "its process was ended from outside before it had answered"
        return {"status": "limit" if how else "killed", "rows": rows, "reason": reason, "log": log_of(setting)}
    if ended["end"] != "ok":
        more = {name: ended[name] for name in ("reason", "traceback")}
        return {"status": ended["end"], "rows": rows, **more, "log": log_of(setting)}
    return {"status": "failed" if any(row.get("pass") is False for row in rows) else "ok", "rows": rows}


def log_of(setting: Setting) -> str:
    """Return the end of what a section's process has printed."""
    log = setting.own / "log.txt"
    return log.read_text(errors="replace")[-4000:] if log.is_file() else ""
