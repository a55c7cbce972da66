"""Run all sections within a budget: first those that measure no time, side by side, and then the timed ones, one by
one.

Each section has a process of its own. When the last untimed section has begun, the processes of the timed ones are
started on a GPU, and import, so that each can answer at once when its turn comes. On a CPU a section is a fork of this
process, which has imported everything; on a GPU it is a new process, since CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import wait
from typing import Any

from gpu_checks.process import Started
from gpu_checks.section import Outcome, Section, Setting

#: most seconds between two checks of the limits
LOOK = 1.0


class Runner:
    """Runs sections. ``keep(name, outcome)`` is called after every section, in the order in which they end; ``cores``:
    number of cores for sections that run side by side; None: all."""

    def __init__(self, setting: Setting, keep: Callable[[str, Outcome], None], cores: int | None = None) -> None:
        self.setting = setting
        self.keep = keep
        self.cores = cores or len(os.sched_getaffinity(0))
        self.context: Any = multiprocessing.get_context("spawn" if setting.gpu else "fork")
        self.started: dict[str, Started] = {}

    def run(self, sections: Sequence[Section]) -> None:
        """Run all sections, in the order given as far as possible. If this call is interrupted, the processes end,
        too."""
        possible = [section for section in sections if self.possible(section)]
        timed = [section for section in possible if section.timed]
        try:
            self.side_by_side([section for section in possible if not section.timed], timed)
            if self.setting.gpu:
                self.import_ahead(timed)
            self.imported()
            for section in timed:
                self.alone(section)
        finally:
            for process in self.started.values():
                process.kill()

    def possible(self, section: Section) -> bool:
        """Return whether the packages that a section needs are installed; else record that they are not."""
        missing = [package for package in section.needs if find_spec(package) is None]
        if missing and not section.only_built(self.setting):
            reason = f"{', '.join(missing)} not installed"
            self.keep(section.name, {"status": "not installed", "rows": [], "reason": reason})
            return False
        return True

    def fits(self, section: Section) -> bool:
        """Return whether the budget still has time for a section; else record that it was skipped."""
        needed = section.tiny_seconds if self.setting.tiny else section.seconds
        left = self.setting.left()
        if needed <= left:
            return True
        reason = f"needs about {needed:.0f} s, {max(left, 0):.0f} s of the budget are left"
        self.keep(section.name, {"status": "skipped", "rows": [], "reason": reason})
        return False

    def side_by_side(self, waiting: list[Section], timed: Sequence[Section]) -> None:
        """Run the sections ``waiting`` on all cores. Once all have begun, those that are ``timed`` import on a GPU."""
        running: list[Started] = []
        while waiting or running:
            waiting = self.begin_what_has_room(waiting, running)
            if not waiting and self.setting.gpu:
                self.import_ahead(timed)
            look_at(running)
            for process in [one for one in running if one.ended() or one.over() <= 0]:
                running.remove(process)
                self.finish(process)

    def begin_what_has_room(self, waiting: list[Section], running: list[Started]) -> list[Section]:
        """Begin those of the ``waiting`` sections for which enough cores are free, in their order, and return the
        others. A section that needs fewer cores may begin before an earlier one that has to wait."""
        later: list[Section] = []
        for section in waiting:
            free = self.cores - sum(process.section.keeps_busy(self.setting) for process in running)
            if running and section.keeps_busy(self.setting) > free:
                later.append(section)
            elif self.fits(section):
                running.append(self.start(section, self.own_cores(section, running)))
        return later

    def own_cores(self, section: Section, running: Sequence[Started]) -> tuple[int, ...]:
        """Return the cores to which a section is bound; none on a GPU, or if too few are free. On a CPU each section
        has its own, so that two engines do not bind their threads to the same ones."""
        taken = {core for process in running for core in process.setting.cores}
        free = sorted(os.sched_getaffinity(0) - taken)[: section.keeps_busy(self.setting)]
        return () if self.setting.gpu or len(free) < section.keeps_busy(self.setting) else tuple(free)

    def import_ahead(self, timed: Sequence[Section]) -> None:
        """Start the processes of the timed sections, which import and then wait."""
        for section in timed:
            if section.name not in self.started:
                self.start(section)

    def imported(self) -> None:
        """Wait until the processes of all timed sections have imported, so that nothing runs beside what is timed."""
        waiting = list(self.started.values())
        while waiting := [one for one in waiting if not (one.ready or one.ended() or one.over() <= 0)]:
            wait([thing for process in waiting for thing in process.waits_on()], timeout=LOOK)
            for process in waiting:
                process.hear()

    def alone(self, section: Section) -> None:
        """Run a timed section, if the budget has time for it."""
        if not self.fits(section):
            return
        process = self.started.get(section.name) or self.start(section)
        process.turn()
        while not process.ended() and process.over() > 0:
            look_at([process])
        self.finish(process)

    def start(self, section: Section, cores: tuple[int, ...] = ()) -> Started:
        self.started[section.name] = process = Started(section, self.setting, self.context, cores)
        return process

    def finish(self, process: Started) -> None:
        del self.started[process.section.name]
        self.keep(process.section.name, process.end())


def look_at(running: Sequence[Started]) -> None:
    """Wait until one of the processes has imported, ends, or reaches its limit, but at most ``LOOK`` seconds. Those
    that have imported are asked at once."""
    if not running:
        return
    for process in running:
        process.go_on()
    first = min([LOOK, *(process.over() for process in running)])
    wait([thing for process in running for thing in process.waits_on()], timeout=max(first, 0))
    for process in running:
        process.go_on()
