"""`grpo-lab pipeline`: a YAML of stages, each with a kind, settings and inputs; carried out in the order of their
inputs, each in the folder of its name, in one process.

    stages:
      - {stage: sample, name: samples, model: runs/start, data: {loader: word_problems, n: 100}, n_samples: 4}
      - {stage: select, name: chosen, inputs: {samples: samples.samples}, keep: {per_problem: 2}}

``inputs``: setting (dotted, in a section) → what a stage before it leaves, ``<stage>.<thing>``. A kind is a class of
settings (`grpo_lab.settings.settings`), one of a team's named ``module:attribute``, with

    run(at)   does it in ``at.folder`` (`runs.stage.At`) and returns facts, which become the stage's marker
    plan()    its words for ``--dry-run``; it may be left out, as the next two
    leaves    what later stages can take, name → place in its folder (``{"model": "model"}``)
    whole     true: asked to stop, it is broken off and done again
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from grpo_lab.pipelines.curate import curate, curation_recipe_from
from grpo_lab.pipelines.long2short import long2short, long2short_recipe_from
from grpo_lab.pipelines.rounds import run_rounds
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import recipe_from, with_name
from grpo_lab.registry import load_named
from grpo_lab.runs.differences import OF_NO_FILE, earlier_run, plain_settings
from grpo_lab.runs.folder import RUN, kept, read_marker
from grpo_lab.runs.stage import At, Facts, Stage, Words, carry_out, console, plan_of, staged_run
from grpo_lab.runs.stop import Interrupted
from grpo_lab.settings import Hours, did_you_mean, one_of, read, settings
from grpo_lab.stages.evaluate import Evaluate
from grpo_lab.stages.sample import Sample
from grpo_lab.stages.select import Select
from grpo_lab.stages.train import ColdStart, Dpo, Merge, Simpo, Train

PIPELINE = "pipeline"


def whole_command(read_recipe: Any, do: Any, **left: str) -> Any:
    """A kind that is a command: its recipe is the entry, and killed in the stage's folder it goes on by itself."""

    @settings(rest="recipe")
    class WholeCommand:
        """``rl``, ``curate``, ``filter``, ``rounds``, ``long2short``: the recipe of `grpo-lab train`, `curate`, …"""

        leaves: ClassVar[Mapping[str, str]] = left
        recipe: Mapping[str, Any]

        def plan(self) -> str:
            read_recipe({**self.recipe, "output_dir": "."})
            plain = {name: value for name, value in self.recipe.items() if not isinstance(value, Mapping | list)}
            return ", ".join(f"{name} {value}" for name, value in plain.items())

        def run(self, at: At) -> Facts:
            try:
                do(read_recipe({"name": at.folder.name, **self.recipe, "output_dir": str(at.folder)}))
            except Interrupted:  # who asked may have asked the pipeline
                at.stop.check()
                raise
            return {}

    return WholeCommand


KINDS: dict[str, Any] = {
    "cold_start": ColdStart,
    "sample": Sample,
    "select": Select,
    "sft": Train,
    "dpo": Dpo,
    "simpo": Simpo,
    "merge": Merge,
    "evaluate": Evaluate,
    "rl": whole_command(recipe_from, train, model="."),
    "curate": whole_command(curation_recipe_from, curate, rows="curated.jsonl"),
    "filter": whole_command(curation_recipe_from, curate, rows="curated.jsonl"),
    "rounds": whole_command(rounds_recipe_from, run_rounds, model="."),
    "long2short": whole_command(long2short_recipe_from, long2short, model="."),
}


def kind_of(name: str, where: str) -> Any:
    """The kind called ``name``, or a team's at ``module:attribute``. ValueError for one that cannot be run."""
    if ":" not in name and name not in KINDS:
        raise ValueError(f"`{where}` is {name!r}{one_of(name, KINDS)}, or 'module:attribute'")
    kind = KINDS[name] if name in KINDS else load_named(name, where)
    if not (isinstance(kind, type) and callable(getattr(kind, "run", None))):
        said = "a kind of stage is a class of `grpo_lab.settings.settings` with `run(at)`"
        raise ValueError(f"`{where}` is {name!r}; {said}")
    return kind


@settings(rest="settings")
class StageSection:
    """One entry of ``stages``: its kind, the name of its folder and marker, its inputs; other keys are its kind's."""

    stage: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    inputs: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def before(self) -> tuple[str, ...]:
        """The stages whose things it takes."""
        return tuple(dict.fromkeys(wanted.partition(".")[0] for wanted in self.inputs.values()))


@settings()
class PipelineRecipe:
    """A whole pipeline. ``max_hours``, ``stop_file``: as in a recipe of `grpo-lab train` (docs/resume.md)."""

    name: str
    output_dir: Path
    stages: Annotated[tuple[StageSection, ...], Field(min_length=1)]
    max_hours: Hours | None = None
    stop_file: str | None = None

    def __post_init__(self) -> None:
        names = [one.name for one in self.stages]
        if twice := [name for name in names if names.count(name) > 1 or name == RUN.removesuffix(".json")]:
            raise ValueError(
                f"`stages` has {twice[0]!r} twice, or it is a name of the folder's own; choose another name"
            )

    def in_order(self) -> list[StageSection]:
        """Every stage after those whose things it takes. ValueError for a circle, or a stage that is none."""
        named = {one.name: one for one in self.stages}
        for one in self.stages:
            for setting, wanted in one.inputs.items():
                if (before := wanted.partition(".")[0]) not in named:
                    raise ValueError(
                        f"`stages`: {one.name!r} takes `{setting}` from {wanted!r}, and no stage is called {before!r}"
                        f"{did_you_mean(before, named)}"
                    )
        try:
            graph = TopologicalSorter({name: one.before for name, one in named.items()})
            return [named[name] for name in graph.static_order()]
        except CycleError as error:
            raise ValueError(f"`stages`: each of {error.args[1]} waits for the next") from error


def pipeline_from(written: Mapping[str, Any], default_name: str = "pipeline") -> PipelineRecipe:
    """A pipeline from a plain mapping. ValueError for an unknown key or a missing section."""
    return read(PipelineRecipe, with_name(written, default_name))


def run_pipeline(recipe: PipelineRecipe, overwrite: bool = False) -> dict[str, Facts]:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder: stage → facts. ``overwrite`` begins
    anew. ValueError for another pipeline or something else there, or a setting that does not fit; Interrupted: asked to
    stop."""
    plan_of_pipeline(recipe, overwrite)  # a mistake leaves the folder as it was
    folder, forget = recipe.output_dir, []
    if overwrite:
        names = read_marker(folder / RUN).get("stages", ())
        forget = [place for name in names for place in (folder / f"{name}.json", folder / name)]
    about = {"pipeline": PIPELINE, "stages": [one.name for one in recipe.stages], "recipe": settings_of(recipe)}
    with staged_run(recipe, lambda: earlier_run(recipe, PIPELINE, overwrite, settings_of), about, forget) as run:
        at = At(folder, run.stop)
        carry_out(stages_of(recipe), at, run.report)
        run.write(finished=True)
        console.print(f"{folder}: {', '.join(at.facts)} are done", soft_wrap=True)
        return at.facts


def plan_of_pipeline(recipe: PipelineRecipe, overwrite: bool = False) -> Words:
    """What `grpo-lab pipeline` will do, in words. ValueError for what would stop it, as far as it can be known
    before."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`grpo-lab pipeline` runs in one process; start it without `accelerate launch` or torchrun")
    earlier_run(recipe, PIPELINE, overwrite, settings_of)
    done = "nothing" if overwrite else kept(recipe)
    return {**plan_of(stages_of(recipe)), "done already": done, "output folder": str(recipe.output_dir)}


def settings_of(recipe: PipelineRecipe) -> dict[str, Any]:
    """What the stages' files follow from, each stage's under its name."""
    said = {name: value for name, value in plain_settings(recipe).items() if name not in OF_NO_FILE}
    return {**said, "stages": {one["name"]: one for one in said["stages"]}}


def stages_of(recipe: PipelineRecipe) -> list[Stage]:
    """The entries as stages, each of its kind with its settings and inputs. ValueError for what does not fit."""
    ordered = recipe.in_order()
    kinds = {one.name: kind_of(one.stage, f"stages.{one.name}.stage") for one in recipe.stages}
    found: list[Stage] = []
    for number, section in enumerate(ordered, 1):
        written: Mapping[str, Any] = section.settings
        for setting, wanted in section.inputs.items():
            before, _, thing = wanted.partition(".")
            leaves = getattr(kinds[before], "leaves", {})
            if thing not in leaves:
                had = sorted(leaves) or "nothing"
                raise ValueError(f"`stages`: {section.name!r} takes {wanted!r}; {before!r} leaves {had}")
            written = _with(written, setting, str(recipe.output_dir / before / leaves[thing]))
        found.append(_stage(number, section, read(kinds[section.name], written, f"stages.{section.name}")))
    return found


def _with(written: Mapping[str, Any], setting: str, value: str) -> dict[str, Any]:
    section, _, rest = setting.partition(".")
    return {**written, section: _with(written.get(section) or {}, rest, value) if rest else value}


def _stage(number: int, section: StageSection, kind: Any) -> Stage:
    def run(at: At) -> Any:
        folder = at.folder / section.name
        folder.mkdir(exist_ok=True)
        return kind.run(At(folder, at.stop, at.facts))

    def plan() -> Words:
        words = [section.stage, *([kind.plan()] if hasattr(kind, "plan") else [])]
        return {f"{number}. {section.name}": ": ".join(filter(None, words))}

    return Stage(section.name, run, plan, section.before, whole=getattr(kind, "whole", False))
