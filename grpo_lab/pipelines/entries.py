"""Stages of a pipeline's recipe, ready to be run, and the files that record how far they are.

``run.json`` records which pipeline the folder holds, ``pipeline.yaml`` what the recipe asks for, and ``pipeline.json``
how far every stage is. All three follow from the recipe and from the stages' own `stage.json`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.run_record import BROKEN_OFF, DONE, FAILED, PIPELINE, STAGES
from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.kinds import kind_of
from grpo_lab.pipelines.outlook import in_stage
from grpo_lab.pipelines.pipeline_recipe import RECIPE, PipelineRecipe, StageSection, plain_recipe
from grpo_lab.pipelines.stage_engine import Stage
from grpo_lab.pipelines.stage_record import StageRecord, digests_at, named_in, seen_at
from grpo_lab.pipelines.standing import NOTHING, Asked, Standing, look_at, standing, state_of
from grpo_lab.recipe.elsewhere import SUPERVISED, refuse_words_from_elsewhere
from grpo_lab.recipe.yaml import set_at, written
from grpo_lab.runs.differences import OF_NO_FILE, versions
from grpo_lab.runs.folder import STAGE, write_run
from grpo_lab.runs.stage import plain_facts
from grpo_lab.runs.stop_requests import Interrupted
from grpo_lab.settings import all_of, read


@dataclass(frozen=True, kw_only=True)
class Entry(Stage):
    """Stage of a pipeline, with a folder of its own. It is done again if what it was made from has changed.

    Args:
        number: place of the stage in the order of all stages, from 1.
        section: entry of the stage in the recipe.
        takes: input, as stage.thing → its place in the pipeline's folder.
    """

    number: int
    section: StageSection
    takes: Mapping[str, str]

    @property
    def whole(self) -> bool:
        """Return whether a stop ends the stage anywhere; never where it runs in other processes (``launch``)."""
        return super().whole and not self.section.launch

    @cached_property
    def asked(self) -> Asked:
        """Everything that the recipe asks of the stage: settings, inputs and outputs."""
        no_matter = {*OF_NO_FILE, *getattr(self.kind, "no_matter", ())}
        kept = {name: value for name, value in plain_facts(self.section.settings).items() if name not in no_matter}
        perhaps = getattr(self.kind, "perhaps", ())
        leaves = [place for thing, place in getattr(self.kind, "leaves", {}).items() if thing not in perhaps]
        keeps = list(getattr(self.kind, "keeps", ()))
        named = sorted({*named_in(kept)})
        return Asked({**kept, "inputs": dict(self.section.inputs)}, dict(self.takes), named, leaves, keeps)

    def record(self) -> StageRecord:
        """Read the stage's record from its folder, with the inputs that the recipe gives it now."""
        found = StageRecord.read(self.folder, self.name, self.section.stage)
        found.before = [*self.section.before]
        taken = self.section.inputs.items()
        found.inputs = {setting: {"from": one, "digest": found.digests.get(one, "")} for setting, one in taken}
        return found

    def due(self, record: StageRecord) -> str:
        """Return why the stage has to be done (``pipelines.standing``); empty if it is done. The stages before it are
        taken to be done."""
        before = {name: Standing(NOTHING, "") for name in self.asked.before}
        look = look_at(self.folder.parent, self.name, record, self.asked)
        stands = standing(record, self.asked, look, before)
        if stands.state == NOTHING:
            return ""
        return stands.why

    def begin(self, record: StageRecord, why: str) -> None:
        """Record what the stage is made from, and make its folder ready: empty, or as a killed stage left it."""
        places = self.asked.places(self.folder.parent)
        record.taken = seen_at(places.values())
        record.prepare(self.folder, why, self.asked.settings, digests_at(places))

    def finish(self, record: StageRecord) -> None:
        record.finish(self.folder, self.places)

    def fail(self, record: StageRecord, error: BaseException) -> None:
        """Record that ``error`` ended the stage. A stage whose marker says "done" stays done: a stop that came after
        that is no failure."""
        if record.status == DONE:
            return
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        with suppress(OSError):  # the folder is gone, or the disk is full: `error` itself is reported
            record.end(self.folder, BROKEN_OFF if stopped else FAILED, "" if stopped else error)


def entries_of(recipe: PipelineRecipe) -> list[Entry]:
    """Return the recipe's stages in the order in which they run, each with its settings checked and its inputs found.

    Raises one ValueError with the mistakes of all stages.
    """
    ordered = recipe.in_order()
    kinds: dict[str, Any] = {}
    found = list[Entry]()
    mistakes: list[Exception] = []
    for section in recipe.stages:
        try:
            kinds[section.name] = kind_of(section.stage, f"stages.{section.name}.stage")
        except ValueError as error:
            mistakes.append(error)
    for number, section in enumerate(ordered, 1):
        if section.name not in kinds or not kinds.keys() >= {*section.before}:
            continue
        try:
            found.append(_entry(number, section, recipe, kinds))
        except ValueError as error:
            mistakes.append(error)
    if mistakes:
        raise all_of(mistakes)
    return found


def _entry(number: int, section: StageSection, recipe: PipelineRecipe, kinds: Mapping[str, Any]) -> Entry:
    """Make one stage: write the places of its inputs into its settings, and read these as its kind does.

    ``kinds``: name of each stage → its kind. Raises ValueError for an input that no stage leaves, or a setting that
    does not fit.
    """
    kind = kinds[section.name]
    if recipe.seed is not None and hasattr(kind, "seed"):
        section = replace(section, settings={"seed": recipe.seed, **section.settings})
    given = plain_facts(section.settings)
    takes: dict[str, str] = {}
    for setting, wanted in section.inputs.items():
        before, _, thing = wanted.partition(".")
        leaves = getattr(kinds[before], "leaves", {})
        if thing not in leaves:
            had = sorted(leaves) or "nothing"
            raise ValueError(f"`stages`: {section.name!r} takes {wanted!r}; {before!r} leaves {had}")
        takes[wanted] = (Path(before) / leaves[thing]).as_posix()
        set_at(given, setting, str(recipe.output_dir / takes[wanted]), f"stages.{section.name}.inputs.")
    if section.launch and not getattr(kind, "ranks", False):
        raise ValueError(f"`stages.{section.name}.launch`: a stage of kind {section.stage!r} runs in one process")
    with in_stage(section.name):
        own = getattr(kind, "__dataclass_fields__", {})
        if "recipe" not in own:  # a command's recipe does it itself
            others = [name for name in given if name not in own]
            refuse_words_from_elsewhere(others, f"`stages.{section.name}`", SUPERVISED)
        settled = read(kind, given, f"stages.{section.name}")
    folder = recipe.output_dir / section.name
    return Entry(section.name, settled, folder, number=number, section=section, takes=takes)


@dataclass
class PipelineFiles:
    """Writes the three files of a pipeline's folder: `run.json`, `pipeline.yaml` and `pipeline.json`.

    A stage that is done is read again only if its own file, `stage.json`, has changed.
    """

    recipe: PipelineRecipe
    entries: Sequence[Entry]
    _said: dict[str, tuple[Any, str, bool]] = field(default_factory=dict)
    """Stage → stamp of its file (time, size, inode; None: no file), its part of `pipeline.json`, and whether it is
    done."""

    def begin(self) -> None:
        """Write all three files; make the folder if needed."""
        folder = self.recipe.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        write_run(folder, {"name": self.recipe.name, "pipeline": PIPELINE, "versions": versions()})
        write_whole_text(folder / RECIPE, written(plain_recipe(self.recipe)))
        self.write()

    def write(self) -> None:
        """Write `pipeline.json`: how far every stage is."""
        folder = self.recipe.output_dir
        opened = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(opened, fcntl.LOCK_EX)  # jobs of two stages may write there at once (``only``)
            parts = [self._part(entry) for entry in self.entries]
            about = {"name": self.recipe.name, "pipeline": PIPELINE, "finished": all(done for _, done in parts)}
            head = json.dumps(about, indent=1)[:-2]
            stages = ",\n".join(text for text, _ in parts)
            write_whole_text(folder / STAGES, f'{head},\n "stages": [\n{stages}\n ]\n}}\n')
        finally:
            os.close(opened)

    def _part(self, entry: Entry) -> tuple[str, bool]:
        """Return a stage's part of `pipeline.json`, as JSON, and whether the stage is done."""
        try:
            found = os.stat(entry.folder / STAGE)
            stamp: Any = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            stamp = None
        then, text, done = self._said.get(entry.name, ("", "", False))
        is_known = then == stamp and (done or stamp is None)
        if not is_known:
            record = entry.record()
            record.status = state_of(entry.folder.parent, record)
            said = {name: one for name, one in asdict(record).items() if name not in ("left", "taken")}
            text = json.dumps({**said, "asked": asdict(entry.asked)}, default=str)
            done = record.status == DONE
            self._said[entry.name] = (stamp, text, done)
        return text, done
