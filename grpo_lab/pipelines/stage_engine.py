"""The engine of every command: it runs a list of stages in order, each of them once. After a kill the same command
continues.

A stage is a kind (``pipelines/kinds.py``) with a name, and the folder where it works. Its marker file is a
``StageRecord``. A stage whose marker says `done` is not done again. Any other is done from its beginning, except that
finished batches of samples are kept, and a training continues from its checkpoint. A stage's random numbers follow from
the run's seed, its folder and its name. So a run that was killed leaves the same files as one that was not.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_lab.evaluation.run_record import DONE
from grpo_lab.pipelines.stage_record import NEW, StageRecord
from grpo_lab.runs.stage import Workspace, plain_facts
from grpo_lab.runs.stop_requests import StopRequests

SECONDS_BETWEEN_COLLECTIONS = 0.5
"""Least time between two garbage collections. With all libraries loaded, one collection takes about half a second;
loading a model takes longer."""
_collected = [0.0]
"""Time of the last garbage collection, by ``time.perf_counter``."""


@dataclass(frozen=True)
class Work:
    """Kind of stage that only one command has: a function ``run(workspace)``, with attributes of a kind as
    ``pipelines/kinds.py`` describes them."""

    run: Callable[[Any], Mapping[str, Any] | None]
    leaves: Mapping[str, str] = field(default_factory=dict)
    keeps: Collection[str] = ()
    whole: bool = False


@dataclass(frozen=True)
class Stage:
    """One stage of a command.

    Args:
        name: name of the stage; its marker is `<name>.json` in ``folder``.
        kind: what the stage does and leaves, a kind of ``pipelines/kinds.py`` or a ``Work``. The place `.` among what
            it leaves means a model in the folder itself.
        folder: folder that the stage works in.
        reads: files and folders of earlier stages that the stage is made from.
        remembered: False: no marker is written, since the stage is cheap, or its own files say whether it is done.
    """

    name: str
    kind: Any
    folder: Path
    reads: Collection[Path] = ()
    remembered: bool = True

    @property
    def marker(self) -> str:
        return f"{self.name}.json"

    @property
    def whole(self) -> bool:
        """Return whether a stop breaks the stage off anywhere, so that it is done again. Else it ends where it checks
        for a stop (``runs.stop_requests``)."""
        return bool(getattr(self.kind, "whole", False))

    @property
    def places(self) -> list[str]:
        """Places in the stage's folder of all that it leaves and keeps."""
        return [*getattr(self.kind, "leaves", {}).values(), *getattr(self.kind, "keeps", ())]

    def record(self) -> StageRecord:
        """Read the stage's record. Raises ValueError if the marker is damaged."""
        if self.remembered:
            return StageRecord.read(self.folder, self.name, self.name, self.marker)
        return StageRecord(self.name, self.name)

    def due(self, record: StageRecord) -> str:
        """Return why the stage has to be done; empty if it is done."""
        if record.status == DONE:
            return ""
        return NEW

    def begin(self, record: StageRecord, why: str) -> None:
        """Make the stage's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def finish(self, record: StageRecord) -> None:
        """Write the marker, which says that the stage is done."""
        record.status = DONE
        if self.remembered:
            record.write(self.folder, self.marker)

    def fail(self, record: StageRecord, error: BaseException) -> None:
        """Write nothing: the command itself reports the error that ended the stage."""

    def lost(self, gone: Collection[Path]) -> list[Path]:
        """List the places of what the stage leaves and keeps that are ``gone``, or that hold a file which is.

        The place `.` stands for a model, whose files are directly in the folder.
        """
        found = []
        for name in self.places:
            place = self.folder / name
            if name == ".":
                is_lost = any(one.parent == place for one in gone)
            else:
                is_lost = any(place in (one, *one.parents) for one in gone)
            if is_lost:
                found.append(place)
        return found


class Caller:
    """Hooks that a command adds around each of its stages; those of this base class add nothing.

    ``carry_out`` calls them in this order for a stage that has to be done: ``hold``, ``begins``, ``run``, ``ends``.
    """

    def hold(self, stage: Any) -> AbstractContextManager[object]:
        """Return a context that keeps other processes away from the stage while it is done."""
        return nullcontext()

    def begins(self, stage: Any, record: StageRecord) -> None:
        """Report that a stage begins."""

    def run(self, stage: Any, workspace: Any) -> Mapping[str, Any] | None:
        """Do the stage, and return its facts."""
        found: Mapping[str, Any] | None = stage.kind.run(workspace)
        return found

    def ends(self, stage: Any, seconds: float) -> None:
        """Report how many seconds a stage has taken: in this start, and in earlier ones if its record has theirs, as
        that of a pipeline's stage does. The marker is written after that, so that the seconds of a stage that is
        done are always reported."""


def carry_out(stages: Iterable[Stage], workspace: Workspace, caller: Caller | None = None) -> list[str]:
    """Do every stage that is not done, in order, and return the names of those that were done now.

    Afterwards ``workspace.facts`` has the facts of all of them. ``caller``: hooks around each stage. Raises ValueError
    for a damaged marker, and Interrupted if a stop was requested; an error of a stage ends the loop.
    """
    caller = caller or Caller()
    done = []
    for stage in stages:
        record = stage.record()
        if stage.due(record):
            with caller.hold(stage):
                record = stage.record()
                why = stage.due(record)
                if why:  # else another process did the stage while this one waited for its lock
                    _do(stage, record, why, workspace, caller)
                    done.append(stage.name)
        workspace.facts[stage.name] = record.results
    return done


def _do(stage: Stage, record: StageRecord, why: str, workspace: Workspace, caller: Caller) -> None:
    """Do one stage for the reason ``why``, and record in its marker how it ended."""
    stage.begin(record, why)
    caller.begins(stage, record)
    began = time.perf_counter()
    before = record.seconds or 0.0
    try:
        with _stoppable(workspace.stop, stage.whole):
            try:
                record.results = plain_facts(caller.run(stage, workspace))
            finally:
                record.seconds = before + time.perf_counter() - began
            caller.ends(stage, record.seconds)
            stage.finish(record)
    except BaseException as error:
        stage.fail(record, error)
        raise


@contextmanager
def _stoppable(stop: StopRequests, whole: bool) -> Iterator[None]:
    """Context around a stage and the writing of its marker: a stop ends it anywhere if it is ``whole``, else only where
    it checks for one. Afterwards the memory of its models is freed."""
    with nullcontext() if whole else stop.defer_stop():
        yield
    began = time.perf_counter()
    if began - _collected[0] > SECONDS_BETWEEN_COLLECTIONS:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _collected[0] = time.perf_counter()


def make_again(stages: Sequence[Stage], gone: Collection[Path]) -> None:
    """Prepare the stages to make again the files that are ``gone`` from a finished run.

    A stage that made one of them loses its marker, and what is left at the place is removed. If what that stage reads
    does not exist any more, the same happens to the earlier stage that made it.
    """
    wanted = {*gone}
    for stage in reversed(stages):
        lost = stage.lost(wanted)
        if lost:
            wanted |= {place for place in stage.reads if not place.exists()}
            (stage.folder / stage.marker).unlink(missing_ok=True)
        for place in lost:
            if place != stage.folder:
                shutil.rmtree(place, ignore_errors=True)  # half of an evaluation is of no use
