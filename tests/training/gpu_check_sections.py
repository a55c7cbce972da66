"""Sections of a check of nothing: what a section can do to its runner, in processes that start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_checks.section import Row, Setting, below, verdict


def answers(setting: Setting, number: float = 1.0) -> Iterator[Row]:
    yield below("a number", number, 2.0)
    with (setting.folder / "begun").open("a") as file:
        file.write(f"{setting.own.name}\n")


def facts(setting: Setting) -> list[Row]:
    return [{"fact": "device", "value": setting.device}]


def breaks(setting: Setting) -> Iterator[Row]:
    yield verdict("the first half", 1)
    raise MemoryError("CUDA out of memory")


def ends_itself(setting: Setting) -> Iterator[Row]:
    raise TimeoutError("not all had run")
    yield {}


def hangs(setting: Setting) -> Iterator[Row]:
    """With a process of another session below it, that would outlive it."""
    yield verdict("the first half", 1)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (setting.folder / "child").write_text(str(child.pid))
    time.sleep(600)


def dies(setting: Setting) -> Iterator[Row]:
    yield verdict("the first half", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def meets(setting: Setting, other: str) -> Iterator[Row]:
    """Answers when the other one has come, too."""
    (setting.folder / f"here-{setting.own.name}").touch()
    wait_for(setting.folder / f"here-{other}", setting)
    yield verdict("the other one came", "yes", "", True)


def is_alone(setting: Setting) -> Iterator[Row]:
    """No other section is at work between its beginning and its end."""
    at_work = setting.folder / "at-work"
    at_work.mkdir()
    yield verdict("others at work", len(list(at_work.iterdir())))
    at_work.rmdir()


def wait_for(file: Path, setting: Setting) -> None:
    while not file.exists():
        if setting.left() < 0:
            raise TimeoutError(f"{file.name} did not come")
        time.sleep(0.005)


def settings_of(setting: Setting, **options: Any) -> list[Row]:
    return [verdict("seconds of its limit", round(setting.left(), 1)), verdict("its port", os.environ["MASTER_PORT"])]
