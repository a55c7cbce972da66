"""`grpo-lab pipeline`: a YAML's stages (``pipelines/pipeline_recipe.py``) in the order of their inputs, each in the
folder of its name; killed anywhere, the same command goes on.

A stage is done again where what it is made from has changed (``pipelines/stage_record.py``), and so is what depends on
what it leaves. ``run.json`` says whose the folder is, ``pipeline.yaml`` what was asked for, ``pipeline.json`` how far
every stage has come: all of it follows from the stages' own `stage.json`."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from grpo_lab.evaluation import write_report
from grpo_lab.evaluation.pipeline_sections import status
from grpo_lab.evaluation.run_record import PIPELINE, STAGES
from grpo_lab.io import write_json, write_whole_text
from grpo_lab.pipelines.estimate import Estimates
from grpo_lab.pipelines.kinds import kind_of
from grpo_lab.pipelines.outlook import Outlook, in_stage
from grpo_lab.pipelines.pipeline_recipe import RECIPE, PipelineRecipe, StageSection, plain_recipe
from grpo_lab.pipelines.stage_record import DONE, StageRecord, digests_of
from grpo_lab.recipe.rows import asking_the_hub_once
from grpo_lab.recipe.yaml import set_at, written
from grpo_lab.runs.differences import OF_NO_FILE, earlier_run, versions
from grpo_lab.runs.folder import one_writer, read_marker, write_run
from grpo_lab.runs.stage import At, Facts, Words, console, plain_facts, under_way, working
from grpo_lab.runs.stop import Interrupted, StopRequests
from grpo_lab.sandbox.kernel import die_with_parent
from grpo_lab.settings import read


@dataclass(frozen=True)
class Entry:
    """A stage that can be carried out: its section, its folder, the places of what it reads (stage.thing → place), its
    kind with its settings."""

    number: int
    section: StageSection
    folder: Path
    inputs: Mapping[str, Path]
    kind: Any

    @property
    def name(self) -> str:
        return self.section.name

    def record(self) -> StageRecord:
        """As its folder says it, with what it takes now."""
        found = StageRecord.read(self.folder, self.name, self.section.stage)
        taken, found.before = self.section.inputs.items(), [*self.section.before]
        found.inputs = {setting: {"from": one, "digest": found.digests.get(one, "")} for setting, one in taken}
        return found

    def begin(self, record: StageRecord) -> bool:
        """Whether it is to be done; its folder is ready then."""
        no_matter = {*OF_NO_FILE, *getattr(self.kind, "no_matter", ())}
        kept = {name: value for name, value in plain_facts(self.section.settings).items() if name not in no_matter}
        leaves, perhaps = getattr(self.kind, "leaves", {}), getattr(self.kind, "perhaps", ())
        left = [place for thing, place in leaves.items() if thing not in perhaps]
        settings = {**kept, "inputs": dict(self.section.inputs)}
        return record.begin(self.folder, settings, digests_of(kept, self.inputs), left)


def entries_of(recipe: PipelineRecipe) -> list[Entry]:
    """The stages in their order, each of its kind with its settings and inputs. ValueError for what does not fit."""
    ordered, found = recipe.in_order(), list[Entry]()
    kinds = {one.name: kind_of(one.stage, f"stages.{one.name}.stage") for one in recipe.stages}
    for number, section in enumerate(ordered, 1):
        if recipe.seed is not None and hasattr(kinds[section.name], "seed"):
            section = replace(section, settings={"seed": recipe.seed, **section.settings})
        given, places = plain_facts(section.settings), dict[str, Path]()
        for setting, wanted in section.inputs.items():
            before, _, thing = wanted.partition(".")
            leaves = getattr(kinds[before], "leaves", {})
            if thing not in leaves:
                had = sorted(leaves) or "nothing"
                raise ValueError(f"`stages`: {section.name!r} takes {wanted!r}; {before!r} leaves {had}")
            places[wanted] = recipe.output_dir / before / leaves[thing]
            set_at(given, setting, str(places[wanted]), f"stages.{section.name}.inputs.")
        if section.launch and not getattr(kinds[section.name], "ranks", False):
            raise ValueError(f"`stages.{section.name}.launch`: a stage of kind {section.stage!r} runs in one process")
        with in_stage(section.name):
            kind = read(kinds[section.name], given, f"stages.{section.name}")
        found.append(Entry(number, section, recipe.output_dir / section.name, places, kind))
    return found


def run_pipeline(
    recipe: PipelineRecipe, overwrite: bool = False, only: str | None = None, launched: bool = False
) -> dict[str, Facts]:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder: stage → facts. ``overwrite`` begins
    anew; ``only``: one stage, whose inputs are there (``launched``: as one of its processes). ValueError: something
    else is in the folder, or a setting does not fit; Interrupted: asked to stop."""
    plan_of_pipeline(recipe, overwrite, only, launched, run=True)  # a mistake leaves the folder as it was
    entries, folder = entries_of(recipe), recipe.output_dir
    if only is not None:
        entry = next(one for one in entries if one.name == only)
        if launched:
            die_with_parent(signal.SIGUSR1)
            record = entry.record()  # of which the first process keeps the results, for the pipeline that launched it
            record.results = plain_facts(entry.kind.run(At(entry.folder, StopRequests(folder))))
            if int(os.environ.get("RANK", "0")) == 0:
                record.write(entry.folder)
            return {only: record.results}
        write_state(recipe, entries)
        with StopRequests(folder, recipe.max_hours, recipe.stop_file) as stop:
            return {only: _carry_out(entry, recipe, entries, At(folder, stop), alone=True)}
    with working(recipe, lambda: earlier_run(recipe, PIPELINE, overwrite, plain_recipe)) as (stop, _):
        for one in read_marker(folder / STAGES).get("stages", ()) if overwrite else ():
            shutil.rmtree(folder / one["name"], ignore_errors=True)
        write_state(recipe, entries)
        at = At(folder, stop)
        for entry in entries:
            at.facts[entry.name] = _carry_out(entry, recipe, entries, at)
        status(folder, console)
        console.print(f"report: {write_report(folder)}", soft_wrap=True)
        return at.facts


def _carry_out(entry: Entry, recipe: PipelineRecipe, entries: Sequence[Entry], at: At, alone: bool = False) -> Facts:
    """One stage, where it is not done: ``alone``, it has its folder's lock, and no pipeline has theirs."""
    record = entry.record()
    if not entry.begin(record):
        return record.results
    write_state(recipe, entries)
    console.rule(f"stage {entry.number} of {len(entries)}: {entry.name}")
    console.print(record.why, style="dim", soft_wrap=True)
    began, done_before = time.perf_counter(), record.seconds or 0.0
    try:
        with under_way(at.stop, getattr(entry.kind, "whole", False) and not entry.section.launch):
            if entry.section.launch:
                _launch(entry, recipe, at.stop)
                record.results = entry.record().results
            else:
                locked = alone and not getattr(entry.kind, "locks", False)
                with one_writer(entry.folder) if locked else nullcontext(), in_stage(entry.name):
                    record.results = plain_facts(entry.kind.run(At(entry.folder, at.stop, at.facts)))
            record.status, record.seconds = DONE, done_before + time.perf_counter() - began
            record.write(entry.folder)
    except (Interrupted, KeyboardInterrupt):
        record.seconds = done_before + time.perf_counter() - began
        record.write(entry.folder)
        raise
    finally:
        write_state(recipe, entries)
    return record.results


def _launch(entry: Entry, recipe: PipelineRecipe, stop: StopRequests) -> None:
    """The stage on the processes that its accelerate file says. ``Interrupted``: asked to stop, and they did. They are
    asked one by one: the launcher itself would kill them 30 seconds later, or leave a single one behind."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(entry.section.launch)]
    launch += [*words_of_stage(recipe, entry.name), "--launched"]
    running = psutil.Popen(launch, process_group=0, preexec_fn=partial(die_with_parent, signal.SIGTERM))
    told = set[int]()
    with stop.patient(signal.SIGINT):
        while running.poll() is None:
            with suppress(psutil.Error):  # one has just ended
                for rank in running.children() if stop.asked() else ():
                    if rank.pid not in told and "--launched" in rank.cmdline():
                        rank.send_signal(signal.SIGUSR1)
                        told.add(rank.pid)
            time.sleep(0.2)
    if running.returncode:
        stop.check()
        raise ValueError(f"stage {entry.name!r} ended with exit code {running.returncode}; what it said stands above")


def words_of_stage(recipe: PipelineRecipe, name: str) -> list[str]:
    """What follows `python` (or `accelerate launch`) to do one stage of what stands in the folder."""
    file, folder = str(recipe.output_dir / RECIPE), str(recipe.output_dir)
    return ["-m", "grpo_lab", "pipeline", "run", file, "--only", name, "--output_dir", folder]


def write_state(recipe: PipelineRecipe, entries: Sequence[Entry]) -> None:
    """The three files of the folder: whose it is, what is asked for now, and how far every stage has come."""
    folder = recipe.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)  # jobs of two stages may write there at once (``only``)
        stages = [asdict(entry.record()) for entry in entries]
        finished = all(one["status"] == DONE for one in stages)
        about = {"name": recipe.name, "pipeline": PIPELINE}
        write_run(folder, {**about, "versions": versions()})
        write_whole_text(folder / RECIPE, written(plain_recipe(recipe)))
        write_json(folder / STAGES, {**about, "finished": finished, "stages": stages})
    finally:
        os.close(opened)


def plan_of_pipeline(
    recipe: PipelineRecipe, overwrite: bool = False, only: str | None = None, launched: bool = False, run: bool = False
) -> Words:
    """What `grpo-lab pipeline` will do, in words, and (not for a ``run``) what it takes. ValueError for what would stop
    it, as far as it can be known before."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not launched:
        raise ValueError("`grpo-lab pipeline` runs in one process; a stage's `launch` names an accelerate file for it")
    entries = entries_of(recipe)
    earlier_run(recipe, PIPELINE, overwrite, plain_recipe)
    done = [one.name for one in entries if not overwrite and one.record().status == DONE]
    if only is not None:
        named = {one.name: one.section for one in entries}
        if only not in named:
            raise ValueError(f"`--only` is {only!r}; the stages are {list(named)}")
        if overwrite:
            raise ValueError("--overwrite begins the whole pipeline anew, --only does one stage: give one of them")
        if missing := [name for name in named[only].before if name not in done]:
            said = f"stage {missing[0]!r}, which it reads, is not done in {recipe.output_dir}"
            raise ValueError(f"`--only {only}`: {said}")
    plan, estimates, outlook = {}, Estimates(), Outlook(here_only=not run)
    with asking_the_hub_once():
        for one in [] if launched else entries:  # who launched them has looked at it
            if only in (None, one.name) and not (run and one.name in done):
                words = outlook.words(one.name, one.kind, one.section.launch)
                plan[f"{one.number}. {one.name}"] = ": ".join(filter(None, [one.section.stage, words]))
            outlook.leave(one.kind, one.folder)
            takes = "" if run else estimates.of(one.kind, one.section.launch, one.folder)
            if f"{one.number}. {one.name}" in plan:
                plan[f"{one.number}. {one.name}"] += takes
    plan |= {} if run else {"in all": estimates.in_all()}
    return {**plan, "done already": ", ".join(done) or "nothing", "output folder": str(recipe.output_dir)}
