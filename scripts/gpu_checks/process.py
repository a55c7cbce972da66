"""The process of one section, seen from the runner: begun, asked, ended at its limit with all that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil

from gpu_checks.section import Outcome, Section, Setting
from gpu_checks.worker import MARK, outcome_of, work

#: seconds for the imports, which no limit counts: on a new machine they are read from the disk for the first time
IMPORTS = 120.0


class Started:
    """A section's process. It imports first; its limit begins when it is asked."""

    def __init__(self, section: Section, setting: Setting, context: Any, cores: tuple[int, ...] = ()) -> None:
        self.section = section
        own = setting.folder / section.name.replace(" ", "_").replace("/", "_")
        self.setting = dataclasses.replace(setting, own=own, cores=cores)
        self.setting.own.mkdir(parents=True, exist_ok=True)
        self.gate, inner = multiprocessing.Pipe()
        self.process = context.Process(target=work, args=(section, self.setting, inner), name=section.name)
        self.process.start()
        inner.close()
        self.began = time.monotonic()
        self.asked: float | None = None
        self.limit = min(IMPORTS, max(setting.left(), 0.1))
        self.ready = False

    def hear(self) -> None:
        """Take in that it has imported everything, where it has said so."""
        with contextlib.suppress(EOFError, OSError):
            if not self.ready and self.gate.poll():
                self.ready = self.gate.recv() == "ready"

    def go_on(self) -> None:
        self.hear()
        if self.ready and self.asked is None:
            self.ask()

    def ask(self) -> None:
        """Its limit counts from now on; it ends with the whole check at the latest."""
        limit = self.section.tiny_limit if self.setting.tiny else self.section.limit
        self.limit = max(min(limit * self.setting.patience, self.setting.left()), 0.1)
        self.asked = time.monotonic()
        with contextlib.suppress(OSError):
            self.gate.send(self.limit)

    def turn(self) -> None:
        """Nothing else runs any more; what it took to come here is not counted against its imports."""
        self.began = time.monotonic()

    def over(self) -> float:
        """Seconds until its limit, or that of its imports."""
        return (self.asked or self.began) + self.limit - time.monotonic()

    def waits_on(self) -> list[int | Connection]:
        return [self.process.sentinel] if self.ready else [self.process.sentinel, self.gate]

    def ended(self) -> bool:
        return not self.process.is_alive()

    def end(self) -> Outcome:
        """Its outcome, after everything that it started has gone."""
        how = None
        if not self.ended():
            what = "its section was ended at its limit of" if self.asked else "its imports were not done after"
            how = f"{what} {self.limit:.0f} s"
        self.kill()
        outcome = outcome_of(self.setting, how)
        if outcome["status"] == "ok" and self.section.only_built(self.setting):
            outcome |= {"status": "gpu only", "reason": self.section.gpu_only}
        outcome["seconds"] = round(time.monotonic() - (self.asked or self.began), 1)
        return outcome

    def kill(self) -> None:
        end_family(self.process.pid, str(self.setting.own))
        self.process.join()
        self.gate.close()


def end_family(pid: int, mark: str) -> None:
    """Kill the process and all that it started, whatever sessions they made and whether or not it still runs: by
    descent, by its session, and by the mark in the environment of what it has left behind."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        top.suspend()  # it starts no other one meanwhile
        family = [*top.children(recursive=True), top]
    for member in [*family, *left_behind(pid, mark)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def left_behind(session: int, mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session or process.environ().get(MARK) == mark:
                found.append(process)
    return found
