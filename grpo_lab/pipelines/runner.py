"""`grpo-lab pipeline`: a YAML's stages (``pipelines/pipeline_recipe.py``) in the order of their inputs, each in the
folder of its name; killed anywhere, the same command goes on.

A stage is done again where what it is made from has changed (``pipelines/stage_record.py``), and so is what depends on
what it leaves. ``run.json`` says whose the folder is, ``pipeline.yaml`` what was asked for, ``pipeline.json`` how far
every stage has come: all of it follows from the stages' own `stage.json`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.evaluation import write_report
from grpo_lab.io import write_json, write_whole_text
from grpo_lab.pipelines.kinds import kind_of
from grpo_lab.pipelines.pipeline_recipe import PipelineRecipe, StageSection, plain_recipe
from grpo_lab.pipelines.stage_record import DONE, StageRecord, begin, made_from
from grpo_lab.pipelines.status import RECIPE, STAGES, print_stages
from grpo_lab.recipe.rows import asking_the_hub_once
from grpo_lab.recipe.yaml import written
from grpo_lab.runs.differences import OF_NO_FILE, earlier_run, versions
from grpo_lab.runs.folder import one_writer, read_marker, write_run
from grpo_lab.runs.stage import At, Facts, Words, console, plain_facts, under_way, working
from grpo_lab.runs.stop import EXIT_INTERRUPTED, Interrupted, StopRequests
from grpo_lab.settings import read

PIPELINE = "pipeline"


@dataclass(frozen=True)
class Entry:
    """A stage that can be carried out: its section, what it reads (setting → stage.thing, place), its kind with its
    settings."""

    number: int
    section: StageSection
    folder: Path
    inputs: Mapping[str, tuple[str, Path]]
    kind: Any

    @property
    def name(self) -> str:
        return self.section.name

    def record(self) -> StageRecord:
        return StageRecord.read(self.folder, self.name, self.section.stage)

    def begin(self, record: StageRecord) -> bool:
        """Whether it is to be done; its folder is ready then."""
        no_matter = {*OF_NO_FILE, *getattr(self.kind, "no_matter", ())}
        now = made_from(self.section.settings, self.inputs, no_matter)
        return begin(self.folder, record, now, getattr(self.kind, "leaves", {}))

    def words(self) -> str:
        """For ``--dry-run``."""
        planned = [self.kind.plan()] if hasattr(self.kind, "plan") else []
        return ": ".join(filter(None, [self.section.stage, *planned]))


def entries_of(recipe: PipelineRecipe) -> list[Entry]:
    """The stages in their order, each of its kind with its settings and inputs. ValueError for what does not fit."""
    ordered, found = recipe.in_order(), list[Entry]()
    kinds = {one.name: kind_of(one.stage, f"stages.{one.name}.stage") for one in recipe.stages}
    for number, section in enumerate(ordered, 1):
        taken: dict[str, tuple[str, Path]] = {}
        given: Any = section.settings
        for setting, wanted in section.inputs.items():
            before, _, thing = wanted.partition(".")
            leaves = getattr(kinds[before], "leaves", {})
            if thing not in leaves:
                had = sorted(leaves) or "nothing"
                raise ValueError(f"`stages`: {section.name!r} takes {wanted!r}; {before!r} leaves {had}")
            taken[setting] = (wanted, recipe.output_dir / before / leaves[thing])
            given = _with(given, setting.split("."), str(taken[setting][1]), f"stages.{section.name}.inputs")
        if section.launch and not getattr(kinds[section.name], "ranks", False):
            raise ValueError(f"`stages.{section.name}.launch`: a stage of kind {section.stage!r} runs in one process")
        kind = read(kinds[section.name], given, f"stages.{section.name}")
        found.append(Entry(number, section, recipe.output_dir / section.name, taken, kind))
    return found


def _with(given: Any, path: list[str], value: str, where: str) -> Any:
    """``given`` with ``value`` at a dotted place; a number is a place in a list."""
    step, *rest = path
    if isinstance(given, list):
        if not (step.isdecimal() and int(step) < len(given)):
            raise ValueError(f"`{where}`: {step!r} is no place of a list with {len(given)} entries")
        at = int(step)
        return [*given[:at], _with(given[at], rest, value, where) if rest else value, *given[at + 1 :]]
    section = given if isinstance(given, Mapping) else {}
    return {**section, step: _with(section.get(step) or {}, rest, value, where) if rest else value}


def run_pipeline(
    recipe: PipelineRecipe, overwrite: bool = False, only: str | None = None, launched: bool = False
) -> dict[str, Facts]:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder: stage → facts. ``overwrite`` begins
    anew; ``only``: one stage, whose inputs are there (``launched``: as one of its processes). ValueError: something
    else is in the folder, or a setting does not fit; Interrupted: asked to stop."""
    plan_of_pipeline(recipe, overwrite, only, launched)  # a mistake leaves the folder as it was
    entries, folder = entries_of(recipe), recipe.output_dir
    if only is not None:
        entry = next(one for one in entries if one.name == only)
        if launched:
            return {only: _as_a_process_of(entry, recipe)}
        prepare(recipe)
        with StopRequests(folder, recipe.max_hours, recipe.stop_file) as stop:
            return {only: _carry_out(entry, recipe, entries, At(folder, stop), alone=True)}
    with working(recipe, lambda: earlier_run(recipe, PIPELINE, overwrite, plain_recipe)) as (stop, _):
        for name in [one["name"] for one in read_marker(folder / STAGES).get("stages", ())] if overwrite else ():
            shutil.rmtree(folder / name, ignore_errors=True)
        prepare(recipe)
        at = At(folder, stop)
        for entry in entries:
            at.facts[entry.name] = _carry_out(entry, recipe, entries, at)
        print_stages(write_stages(recipe, entries), console)
        console.print(f"report: {write_report(folder)}", soft_wrap=True)
        return at.facts


def prepare(recipe: PipelineRecipe) -> None:
    """The folder as a pipeline's: ``run.json``, and ``pipeline.yaml`` with what is asked for now."""
    recipe.output_dir.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(recipe.output_dir):
        write_run(recipe.output_dir, {"name": recipe.name, "pipeline": PIPELINE, "versions": versions()})
        write_whole_text(recipe.output_dir / RECIPE, written(plain_recipe(recipe)))


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Jobs of two stages may write there at once (``only``)."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _carry_out(entry: Entry, recipe: PipelineRecipe, entries: Sequence[Entry], at: At, alone: bool = False) -> Facts:
    """One stage, where it is not done: ``alone``, it has its folder's lock, and no pipeline has theirs."""
    record = entry.record()
    if not entry.begin(record):
        return record.results
    write_stages(recipe, entries)
    console.rule(f"stage {entry.number} of {len(entries)}: {entry.name}")
    console.print(record.why, style="dim", soft_wrap=True)
    began, done_before = time.perf_counter(), record.seconds
    try:
        with under_way(at.stop, getattr(entry.kind, "whole", False)):
            if entry.section.launch:
                _launch(entry, recipe, at.stop)
                record.results = entry.record().results
            else:
                locked = alone and not getattr(entry.kind, "locks", False)
                with one_writer(entry.folder) if locked else nullcontext():
                    record.results = plain_facts(entry.kind.run(At(entry.folder, at.stop, at.facts)))
            record.status, record.seconds = DONE, done_before + time.perf_counter() - began
            record.write(entry.folder)
    except (Interrupted, KeyboardInterrupt):
        record.seconds = done_before + time.perf_counter() - began
        record.write(entry.folder)
        raise
    finally:
        write_stages(recipe, entries)
    return record.results


def _launch(entry: Entry, recipe: PipelineRecipe, stop: StopRequests) -> None:
    """The stage on the processes that its accelerate file says. ``Interrupted``: asked to stop, and they did."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(entry.section.launch)]
    words = ["-m", "grpo_lab", "pipeline", "run", str(recipe.output_dir / RECIPE), "--only", entry.name, "--launched"]
    running = subprocess.Popen([*launch, *words, "--output_dir", str(recipe.output_dir)])
    asked = False
    while running.poll() is None:
        if stop.asked() is not None and not asked:
            asked = True
            running.terminate()
        time.sleep(0.2)
    if running.returncode == EXIT_INTERRUPTED or asked:
        stop.check()
        raise Interrupted("the launched stage was asked", None, entry.folder)
    if running.returncode:
        raise ValueError(f"stage {entry.name!r} ended with exit code {running.returncode}; what it said stands above")


def _as_a_process_of(entry: Entry, recipe: PipelineRecipe) -> Facts:
    """What each process of a launched stage does; the first keeps the results for the pipeline that launched it."""
    record = entry.record()
    results = plain_facts(entry.kind.run(At(entry.folder, StopRequests(recipe.output_dir))))
    if int(os.environ.get("RANK", "0")) == 0:
        record.results = results
        record.write(entry.folder)
    return results


def write_stages(recipe: PipelineRecipe, entries: Sequence[Entry]) -> dict[str, Any]:
    """``pipeline.json``: how far every stage has come, with its results, as the stages' folders say it."""
    with _one_at_a_time(recipe.output_dir):
        state = _state(recipe, entries)
        write_json(recipe.output_dir / STAGES, state)
    return state


def _state(recipe: PipelineRecipe, entries: Sequence[Entry]) -> dict[str, Any]:
    stages = []
    for entry in entries:
        found = entry.record()
        said = {name: getattr(found, name) for name in ("name", "kind", "status", "why", "seconds", "results")}
        taken = found.made_from.get("inputs") or {name: {"from": wanted} for name, (wanted, _) in entry.inputs.items()}
        stages.append({**said, "inputs": taken, "before": list(entry.section.before)})
    finished = all(one["status"] == DONE for one in stages)
    return {"name": recipe.name, "pipeline": PIPELINE, "finished": finished, "stages": stages}


def plan_of_pipeline(
    recipe: PipelineRecipe, overwrite: bool = False, only: str | None = None, launched: bool = False
) -> Words:
    """What `grpo-lab pipeline` will do, in words. ValueError for what would stop it, as far as it can be known
    before."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not launched:
        raise ValueError("`grpo-lab pipeline` runs in one process; a stage's `launch` names an accelerate file for it")
    entries = entries_of(recipe)
    earlier_run(recipe, PIPELINE, overwrite, plain_recipe)
    if only is not None:
        _refuse_alone(recipe, entries, overwrite, only)
    kept = [] if overwrite else [one.name for one in entries if one.record().status == DONE]
    with asking_the_hub_once():
        plan = {f"{one.number}. {one.name}": one.words() for one in entries if only in (None, one.name)}
    return {**plan, "done already": ", ".join(kept) or "nothing", "output folder": str(recipe.output_dir)}


def _refuse_alone(recipe: PipelineRecipe, entries: Sequence[Entry], overwrite: bool, only: str) -> None:
    named = {one.name: one for one in entries}
    if only not in named:
        raise ValueError(f"`--only` is {only!r}; the stages are {list(named)}")
    if overwrite:
        raise ValueError("--overwrite begins the whole pipeline anew; --only does one stage of it. Give one of them")
    for before in named[only].section.before:
        if named[before].record().status != DONE:
            raise ValueError(f"`--only {only}`: stage {before!r}, which it reads, is not done in {recipe.output_dir}")
