"""The process of one section as the runner sees it: started, asked for its answer, and ended at its limit together with
all processes that it has started."""

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

#: seconds for the imports, which do not count against the section's limit: on a new machine the disk is slow at first
IMPORTS = 120.0


class Started:
    """A section's process. It imports first; its time limit begins when it is asked to answer.

    Attributes:
        gate: connection to the process: "ready" comes from it, and the limit in seconds goes to it.
        ready: whether it has imported everything.
        began: when its imports began, on the clock of ``time.monotonic``.
        asked: when it was asked to answer; None before.
        limit: seconds of its imports or, once it is asked, of its answer.
    """

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
        """Note that the process has imported everything, if it has said so."""
        with contextlib.suppress(EOFError, OSError):
            if not self.ready and self.gate.poll():
                self.ready = self.gate.recv() == "ready"

    def go_on(self) -> None:
        """Ask the process to answer, if it is ready and was not asked yet."""
        self.hear()
        if self.ready and self.asked is None:
            self.ask()

    def ask(self) -> None:
        """Ask the process to answer. Its limit counts from now on, but not beyond the end of the whole check."""
        limit = self.section.tiny_limit if self.setting.tiny else self.section.limit
        self.limit = max(min(limit * self.setting.patience, self.setting.left()), 0.1)
        self.asked = time.monotonic()
        with contextlib.suppress(OSError):
            self.gate.send(self.limit)

    def turn(self) -> None:
        """Let the limit of its imports begin anew: before its turn it shared the machine with other sections."""
        self.began = time.monotonic()

    def over(self) -> float:
        """Return the seconds until its limit, or that of its imports; below 0 if it is over."""
        return (self.asked or self.began) + self.limit - time.monotonic()

    def waits_on(self) -> list[int | Connection]:
        """Return the objects to wait for: the end of the process and, until it is ready, its message."""
        return [self.process.sentinel] if self.ready else [self.process.sentinel, self.gate]

    def ended(self) -> bool:
        return not self.process.is_alive()

    def end(self) -> Outcome:
        """End the process and everything that it has started, and return its outcome."""
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
        """End the process and everything that it has started."""
        end_family(self.process.pid, str(self.setting.own))
        self.process.join()
        self.gate.close()


def end_family(pid: int, mark: str) -> None:
    """Kill a process and everything that it has started, whether or not it still runs. They are found by descent, by
    its session, and by the ``mark`` in their environment, since some may have made sessions of their own."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        top.suspend()  # so that it starts no further process
        family = [*top.children(recursive=True), top]
    for member in [*family, *left_behind(pid, mark)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def left_behind(session: int, mark: str) -> list[psutil.Process]:
    """Return the processes that are in a session, or have the mark of a section in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session or process.environ().get(MARK) == mark:
                found.append(process)
    return found
