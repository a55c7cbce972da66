"""A command is a list of stages, carried out in order; each leaves a marker when it is done; killed anywhere, the same
command goes on.

What a stage returns, its facts, are its marker, written whole: a stage with a marker is never done again, one without
is done from its beginning (samples are kept by their batches, a training by its checkpoint). Whatever a stage draws
follows from the run's seed, its folder and its name, so a run that was killed leaves the same files as one that was
not. ``runs`` knows no stage of its own: ``stages/`` has what they do, and a command says which, in which folder."""

from __future__ import annotations

import gc
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import write_json
from grpo_lab.runs.differences import versions
from grpo_lab.runs.folder import one_writer, read_marker, write_run
from grpo_lab.runs.stop_requests import StopRequests

Facts = dict[str, Any]
Words = dict[str, str]
Report = Callable[[Any, str, float | None], None]
"""``report(workspace, stage, None)`` before a stage, with its seconds afterwards."""

console = Terminal()
SECONDS_BETWEEN_COLLECTIONS = 0.5
"""Less than loading a model takes, and as much as looking for what nobody holds takes beside all libraries."""
_collected = [0.0]
"""When that was last done."""


@dataclass
class Workspace:
    """The place where stages work: the folder of their files and markers; ``stop``, asked between two things that are
    done (``check``) and around a training; the facts of the stages that are done."""

    folder: Path
    stop: StopRequests
    facts: dict[str, Facts] = field(default_factory=dict)


def __getattr__(name: str) -> Any:
    """``At`` is the deprecated name of ``Workspace``, which a team's kinds of stage may import."""
    if name != "At":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "`grpo_lab.runs.stage.At` is called `Workspace` now; the old name goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return Workspace


@dataclass(frozen=True)
class Stage:
    """A step of a command.

    Args:
        run: ``run(workspace)`` does it, writing its files into ``workspace.folder``, and returns facts: what later
            stages, tables and pages read of it. They are its marker, ``<name>.json``.
        plan: what it will do, title → words, for ``--dry-run``; writes nothing, and raises what would stop it.
        inputs: the stages before it whose facts it reads.
        remembered: false leaves no marker: it is cheap, and follows from settings that may change between two runs.
        whole: a stop breaks it off, and it is done again; without, a stop ends it where it looks
            (``runs.stop_requests``).
    """

    name: str
    run: Callable[[Any], Mapping[str, Any] | None]
    plan: Callable[[], Mapping[str, str]] = dict
    inputs: tuple[str, ...] = ()
    remembered: bool = True
    whole: bool = False


def no_report(_workspace: Any, _stage: str, _seconds: float | None) -> None:
    """Report nothing."""


def carry_out(stages: Sequence[Stage], workspace: Workspace, report: Report = no_report) -> None:
    """Run every stage that has no marker, in order; ``workspace.facts`` has the facts of all of them afterwards.

    ValueError: a damaged marker, or a stage that reads one that does not come before it; Interrupted: asked to stop."""
    workspace.folder.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        if missing := [name for name in stage.inputs if name not in workspace.facts]:
            raise ValueError(f"stage {stage.name!r} reads {missing}, and before it come {list(workspace.facts)}")
        marker = workspace.folder / f"{stage.name}.json"
        found = None
        if stage.remembered:
            found = read_facts(marker)
        if found is None:
            began = time.perf_counter()
            report(workspace, stage.name, None)
            with run_stage(workspace.stop, stage.whole):
                found = plain_facts(stage.run(workspace))
                report(workspace, stage.name, time.perf_counter() - began)  # before the marker: a kill loses no time
                if stage.remembered:
                    write_json(marker, found)
        workspace.facts[stage.name] = found


@contextmanager
def run_stage(stop: StopRequests, whole: bool) -> Iterator[None]:
    """Context around a stage and its marker: a stop ends the stage where it looks, one that is ``whole`` anywhere."""
    with nullcontext() if whole else stop.defer_stop():
        yield
    began = time.perf_counter()
    if began - _collected[0] > SECONDS_BETWEEN_COLLECTIONS:
        gc.collect()  # and the accelerator's memory, of models that nobody holds any more
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _collected[0] = time.perf_counter()


def plain_facts(found: Mapping[str, Any] | None) -> Facts:
    """Return the facts of a stage as JSON gives them back."""
    plain: Facts = json.loads(json.dumps(dict(found or {}), default=str))
    return plain


def plan_of(stages: Iterable[Stage]) -> Words:
    """Say what the stages will do. ValueError for what would stop one of them."""
    return {title: words for stage in stages for title, words in stage.plan().items()}


@contextmanager
def locked_run(recipe: Any, earlier: Callable[[], Facts]) -> Iterator[tuple[StopRequests, Facts]]:
    """Hold the lock of a command's folder for the block, and let the run be asked to stop (``Interrupted``, here or in
    the block). ``earlier``: what an earlier run, which is gone on with, says of itself; empty: this one is new, and a
    stop file that waits is an earlier one's."""
    folder = recipe.output_dir
    with one_writer(folder), StopRequests(folder, recipe.max_hours, recipe.stop_file) as stop:
        found = earlier()
        stop.heed_waiting(new=not found)
        yield stop, found


@dataclass
class StagedRun:
    """A run of a command in its folder; ``about``: what ``run.json`` says of it."""

    folder: Path
    stop: StopRequests
    about: dict[str, Any]

    def write(self, **more: Any) -> None:
        """``run.json`` with what is new."""
        self.about |= more
        write_run(self.folder, self.about)

    def report(self, workspace: Workspace, stage: str, seconds: float | None) -> None:
        """A rule on the terminal before each stage; its seconds afterwards."""
        place = ""
        if workspace.folder != self.folder:
            place = f"{workspace.folder.name.replace('-', ' ')}, "
        if seconds is None:
            console.rule(f"{place}{stage}")
        else:
            self.about["seconds"][f"{place}{stage}"] = round(seconds, 1)
            self.write()


@contextmanager
def staged_run(
    recipe: Any, earlier: Callable[[], Facts], about: Mapping[str, Any], forget: Iterable[Path] = ()
) -> Iterator[StagedRun]:
    """Do as ``locked_run``, and keep ``run.json``. ``about``: the command (``pipeline``), and what else is said of the
    recipe; ``forget``: files and folders of an earlier run that this one takes the place of."""
    with locked_run(recipe, earlier) as (stop, found):
        for place in forget:
            shutil.rmtree(place, ignore_errors=True)
            if place.is_file():
                place.unlink()
        seconds = found.get("seconds")
        if isinstance(seconds, Mapping):  # long2short's was once a single number
            known = dict(seconds)
        else:
            known = {}
        run = StagedRun(recipe.output_dir, stop, {"name": recipe.name, **about, "versions": versions()})
        run.write(seconds=known, finished=bool(found.get("finished")))
        yield run


def read_facts(marker: Path) -> Facts | None:
    """Read what a finished stage found; None where it is not finished. ValueError for a damaged marker."""
    if marker.is_file():
        return read_marker(marker, "remove it, and the part is done again")
    return None
