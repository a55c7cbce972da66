"""`grpo-lab pipeline`: run a YAML's stages (``pipelines/pipeline_recipe.py``) in the order of their inputs.

Each stage has a folder of its name. After a kill the same command continues. ``pipelines/standing.py`` decides what has
to be done with a stage; ``pipelines/entries.py`` makes the stages from the recipe and keeps the pipeline's files. A
stage is locked while it is done, so another process may do another stage of the pipeline (``only``).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from grpo_lab.evaluation.run_record import PIPELINE, RUNNING
from grpo_lab.pipelines.entries import Entry, PipelineFiles, entries_of
from grpo_lab.pipelines.estimate import Estimates
from grpo_lab.pipelines.outlook import Outlook, in_stage, processes_of
from grpo_lab.pipelines.pipeline_recipe import RECIPE, PipelineRecipe, plain_recipe
from grpo_lab.pipelines.stage_engine import Caller, carry_out
from grpo_lab.pipelines.stage_record import NEW, StageRecord
from grpo_lab.pipelines.staged_command import locked_run
from grpo_lab.pipelines.standing import LOCK_OF_STAGE, NOTHING, Standing, report, status, survey
from grpo_lab.recipe.data import asking_the_hub_once
from grpo_lab.runs.differences import earlier_run
from grpo_lab.runs.folder import LOCK, STAGE, one_writer
from grpo_lab.runs.stage import Facts, Words, Workspace, console, plain_facts
from grpo_lab.runs.stop_requests import Interrupted, StopRequests
from grpo_lab.sandbox.kernel import die_with_parent
from grpo_lab.settings import all_of

PIPELINE_OF_RANK = "GRPO_LAB_PIPELINE_PROCESS"
"""Environment variable that tells a launched rank the process id of the pipeline."""


def run_pipeline(
    recipe: PipelineRecipe, overwrite: bool = False, only: str | None = None, launched: bool = False
) -> dict[str, Facts]:
    """Run ``recipe``, or continue what an earlier, killed run left in the folder; return stage → facts.

    Args:
        recipe: the pipeline.
        overwrite: begin anew; every stage in the folder is removed.
        only: do only the stage of this name, whose inputs must be there.
        launched: this process is one of those that `accelerate launch` has started for the stage ``only``.

    Raises:
        ValueError: something else is in the folder, a setting does not fit, or a stage failed in its processes.
        Interrupted: a stop was requested.
    """
    folder = recipe.output_dir
    if launched:
        entry = next(one for one in entries_of(recipe) if one.name == only)
        return {entry.name: _as_launched(entry, folder)}
    plan_of_pipeline(recipe, overwrite, only, run=True)  # a mistake leaves the folder as it was
    entries = entries_of(recipe)
    files = PipelineFiles(recipe, entries)
    if only is not None:
        entries = [one for one in entries if one.name == only]
        files.begin()
        with StopRequests(folder, recipe.max_hours, recipe.stop_file) as stop:
            workspace = Workspace(folder, stop)
            done = _go_through(entries, files, workspace)
        if not done:
            console.print(f"stage {only!r} is done: nothing to do", soft_wrap=True)
        status(folder, console)
        return workspace.facts
    with locked_run(recipe, lambda: earlier_run(recipe, PIPELINE, overwrite, plain_recipe)) as (stop, _):
        if overwrite:
            forget_stages(recipe)
        files.begin()
        workspace = Workspace(folder, stop)
        _go_through(entries, files, workspace)
        status(folder, console)
        console.print(f"report: {report(folder)}", soft_wrap=True)
        return workspace.facts


def _go_through(entries: Sequence[Entry], files: PipelineFiles, workspace: Workspace) -> list[str]:
    """Do the stages that are not done, and keep `pipeline.json` up to date; return the names of those done now."""
    try:
        return carry_out(entries, workspace, PipelineRun(files))
    finally:
        files.write()


@dataclass
class PipelineRun(Caller):
    """A run of a pipeline: locks each stage while it is done, and keeps the pipeline's files up to date."""

    files: PipelineFiles

    def hold(self, stage: Entry) -> AbstractContextManager[object]:
        return _held(stage.folder)

    def begins(self, stage: Entry, record: StageRecord) -> None:
        self.files.write()
        console.rule(f"stage {stage.number} of {len(self.files.entries)}: {stage.name}")
        console.print(record.why, style="dim", soft_wrap=True)

    def run(self, stage: Entry, workspace: Workspace) -> Mapping[str, Any] | None:
        """Do the stage in this process, or on the processes of its accelerate file."""
        if not stage.section.launch:
            with in_stage(stage.name):
                return super().run(stage, Workspace(stage.folder, workspace.stop, workspace.facts))
        try:
            _launch(stage, self.files.recipe, workspace.stop)
        except ValueError as failed:
            said = stage.record().error  # recorded by the first of the launched processes
            raise ValueError(f"{failed} ({said})" if said else str(failed)) from failed
        return stage.record().results


def forget_stages(recipe: PipelineRecipe) -> None:
    """Remove the folder of every stage in the pipeline's folder, also of those that another recipe left, and nothing
    else. Where a stage's folder is a symbolic link, only the link is removed. Raises ValueError if another process
    works on one of them; then none is removed."""
    found = [one for one in sorted(recipe.output_dir.iterdir()) if "." not in one.name and (one / STAGE).is_file()]
    with ExitStack() as held:
        for place in found:  # lock all of them before the first is removed
            held.enter_context(_held(place))
        for place in found:
            if place.is_symlink():
                place.unlink()
            else:
                shutil.rmtree(place)


@contextmanager
def _held(place: Path) -> Iterator[None]:
    """Hold the lock of the stage whose folder is ``place`` for the block.

    Raises ValueError if a process is still at work on it, such as one that outlived its killed launcher: it holds the
    lock inside the folder.
    """
    name = place.name
    with one_writer(place.parent, LOCK_OF_STAGE.format(name), f"stage {name!r} of {str(place.parent)!r}"):
        if (place / LOCK).exists():
            with one_writer(place, what=f"stage {name!r} of {str(place.parent)!r}"):
                pass
        yield


def _as_launched(entry: Entry, folder: Path) -> Facts:
    """Do a stage as one of its launched processes, and return its facts. The first process also writes them into the
    stage's marker, where the pipeline that launched it reads them."""
    _end_with_launcher(entry)
    first = int(os.environ.get("RANK", "0")) == 0
    asked = processes_of(entry.section.launch, entry.name)
    here = int(os.environ.get("WORLD_SIZE", "1"))
    if here != asked:
        raise ValueError(
            f"`stages.{entry.name}.launch`: {entry.section.launch!r} says `num_processes` {asked}, and accelerate has "
            f"started {here}"
        )
    record = entry.record()
    locked = first and not getattr(entry.kind, "locks", False)
    with one_writer(entry.folder) if locked else nullcontext():
        try:
            record.results = plain_facts(entry.kind.run(Workspace(entry.folder, StopRequests(folder))))
        except Exception as error:
            if first and not isinstance(error, Interrupted):
                record.end(entry.folder, RUNNING, error)
            raise
        if first:
            record.write(entry.folder)
    return record.results


def _end_with_launcher(entry: Entry) -> None:
    """Let this process be asked to stop (SIGUSR1) when its launcher ends.

    Raises Interrupted if the pipeline is no longer among this process's parents: the launcher ended while this process
    was still importing what it needs, and no signal would come any more.
    """
    die_with_parent(signal.SIGUSR1)
    pipeline = os.environ.get(PIPELINE_OF_RANK)
    if pipeline is not None and int(pipeline) not in [one.pid for one in psutil.Process().parents()]:
        raise Interrupted("its launcher has ended", None, entry.folder)


def _launch(entry: Entry, recipe: PipelineRecipe, stop: StopRequests) -> None:
    """Run the stage by `accelerate launch` on the processes of its accelerate file, and wait for their end.

    A request to stop is passed on to each process by a signal of its own: if the launcher got it, it would kill them
    all 30 seconds later, or leave a single one behind. Raises Interrupted if a stop was requested and the processes
    ended with an error code, and ValueError if they did so without.
    """
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(entry.section.launch)]
    launch += [*words_of_stage(recipe, entry.name), "--launched"]
    environment = {**os.environ, PIPELINE_OF_RANK: str(os.getpid())}
    ends_with_this = partial(die_with_parent, signal.SIGTERM)
    running = psutil.Popen(launch, process_group=0, env=environment, preexec_fn=ends_with_this)
    signalled = set[int]()
    with stop.defer_signals(signal.SIGINT):
        while running.poll() is None:
            with suppress(psutil.Error):  # one has just ended
                for rank in running.children() if stop.asked() else ():
                    if rank.pid not in signalled and "--launched" in rank.cmdline():
                        rank.send_signal(signal.SIGUSR1)
                        signalled.add(rank.pid)
            time.sleep(0.2)
    if running.returncode:
        stop.check()
        raise ValueError(f"stage {entry.name!r} ended with exit code {running.returncode}; what it said stands above")


def words_of_stage(recipe: PipelineRecipe, name: str) -> list[str]:
    """Return the words of a command line, after `python` or `accelerate launch`, that do one stage of the pipeline in
    its output folder."""
    file = str(recipe.output_dir / RECIPE)
    folder = str(recipe.output_dir)
    return ["-m", "grpo_lab", "pipeline", "run", file, "--only", name, "--output_dir", folder]


def plan_of_pipeline(
    recipe: PipelineRecipe, overwrite: bool = False, only: str | None = None, launched: bool = False, run: bool = False
) -> Words:
    """Check the stages of a pipeline before the first begins; describe what `grpo-lab pipeline` will do.

    ``only``, ``overwrite`` and ``launched``: as in ``run_pipeline``. ``run``: a run is about to begin, so that what is
    done already is not checked, and nothing is estimated; else this is a dry run, which adds memory and tokens to each
    stage's line. Raises one ValueError with the mistakes of all stages, as far as they can be known now.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not launched:
        raise ValueError("`grpo-lab pipeline` runs in one process; a stage's `launch` names an accelerate file for it")
    entries = entries_of(recipe)
    earlier_run(recipe, PIPELINE, overwrite, plain_recipe)
    names = [one.name for one in entries]
    if only is not None and only not in names:
        raise ValueError(f"`--only` is {only!r}; the stages are {names}")
    if only is not None and overwrite:
        raise ValueError("--overwrite begins the whole pipeline anew, --only does one stage: give one of them")
    stands = dict.fromkeys(names, Standing(NEW, "new"))
    if not overwrite and not launched:
        records = {one.name: one.record() for one in entries}
        stands = survey(recipe.output_dir, {one.name: one.asked for one in entries}, records)
    if only is not None:
        _check_inputs(entries[names.index(only)], stands)
    plan: dict[str, str] = {}
    if not launched:  # else the pipeline that launched this process has checked all stages
        plan = _plan_of_stages(entries, stands, only, run)
    done = [name for name, one in stands.items() if one.state == NOTHING]
    left = [f"{name} ({one.why})" for name, one in stands.items() if one.state != NOTHING]
    more = {}
    if any(one.state != NEW for one in stands.values()) and left:
        more = {"to do": ", ".join(left)}
    return {**plan, "done already": ", ".join(done) or "nothing", **more, "output folder": str(recipe.output_dir)}


def _check_inputs(only: Entry, stands: Mapping[str, Standing]) -> None:
    """Raise ValueError if a stage is not done that the stage ``only``, which is to be done alone, takes inputs from."""
    for name in only.asked.before:
        if stands[name].state != NOTHING:
            said = f"stage {name!r}, which it reads, is not done in {only.folder.parent} ({stands[name].why})"
            raise ValueError(f"`--only {only.name}`: {said}; `grpo-lab pipeline run` without it does both")


def _plan_of_stages(
    entries: Sequence[Entry], stands: Mapping[str, Standing], only: str | None, run: bool
) -> dict[str, str]:
    """Check the stages; return a line for each and, in a dry run, one on all of them. Raises one ValueError with all
    mistakes. The arguments are those of ``plan_of_pipeline``."""
    plan: dict[str, str] = {}
    mistakes: list[Exception] = []
    estimates = Estimates()
    outlook = Outlook(here_only=not run)
    with asking_the_hub_once():
        for one in entries:
            title = f"{one.number}. {one.name}"
            is_done = stands[one.name].state == NOTHING
            try:
                if only in (None, one.name) and not (run and is_done):
                    words = outlook.words(one.name, one.kind, one.section.launch)
                    plan[title] = ": ".join(filter(None, [one.section.stage, words]))
                if not run:  # also of stages that have no line: a later one may use their model
                    takes = estimates.of(one.kind, one.section.launch, one.folder)
                    if title in plan:
                        plan[title] += takes
            except ValueError as error:
                mistakes.append(error)
            with suppress(ValueError):  # the mistake is in the list already
                outlook.leave(one.kind, one.folder)
    if mistakes:
        raise all_of(mistakes)
    if not run:
        plan["in all"] = estimates.in_all()
    return plan
