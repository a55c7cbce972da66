"""`grpo-lab pipeline`: a YAML of stages, each with a kind, settings and inputs; carried out in the order of their
inputs.

    name: distil
    stages:
      - {stage: sample, name: samples, model: runs/start, data: {loader: word_problems, n: 100}, n_samples: 4}
      - {stage: select, name: chosen, inputs: {samples: samples.samples}, keep: {per_problem: 2}}
      - {stage: sft, name: student, model: runs/start, inputs: {rows: chosen.rows}, max_steps: 20}
      - {stage: evaluate, name: after, inputs: {model: student.model}, data: {loader: word_problems, n: 50, split:
        test}}

``inputs``: setting (dotted, in a section) → what a stage before it leaves, ``<stage>.<thing>``. A stage works in the
folder of its name; its marker is ``<name>.json`` beside it. Killed anywhere, the same command goes on with the stages
that have none; a changed recipe is refused with its differences; ``--overwrite`` begins anew. It runs in one process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.pipelines.kinds import Work, kind_of
from grpo_lab.pipelines.releases import versions
from grpo_lab.recipe.sections import with_name
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.runs.differences import plain_settings, refuse_other_settings
from grpo_lab.runs.folder import RUN, read_marker, record_of, write_run
from grpo_lab.runs.stage import At, Facts, Stage, Words, carry_out, plan_of, working
from grpo_lab.runs.stop import STOP_SETTINGS, Interrupted, StopRequests
from grpo_lab.settings import Hours, did_you_mean, read, settings

PIPELINE = "pipeline"
MAY_CHANGE = ("name", "output_dir", *STOP_SETTINGS)

console = Terminal()


@settings(rest="settings")
class StageSection:
    """One entry of ``stages``. Every key that is not here is a setting of its kind.

    Args:
        stage: kind: one of `pipelines.kinds.KINDS`, or ``module:attribute``.
        name: of its folder and its marker; letters, digits, ``-`` and ``_``.
    """

    stage: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    inputs: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


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
        """Every stage after those whose things it takes, else as they are written. ValueError for a circle, or a stage
        that is none."""
        named = {one.name: one for one in self.stages}
        for one in self.stages:
            for setting, wanted in one.inputs.items():
                before = wanted.partition(".")[0]
                if before not in named:
                    raise ValueError(
                        f"`stages`: {one.name!r} takes `{setting}` from {wanted!r}, and no stage is called {before!r}"
                        f"{did_you_mean(before, named)}"
                    )
        graph = {one.name: [wanted.partition(".")[0] for wanted in one.inputs.values()] for one in self.stages}
        try:
            return [named[name] for name in TopologicalSorter(graph).static_order()]
        except CycleError as error:
            raise ValueError(f"`stages`: each of {error.args[1]} waits for the next") from error


def read_pipeline(path: str | Path, overrides: Mapping[str, Any] | None = None) -> PipelineRecipe:
    """The pipeline in ``path`` with ``--key value`` overrides. ValueError for what cannot be one."""
    return pipeline_from(read_yaml(path, overrides), Path(path).stem)


def pipeline_from(written: Mapping[str, Any], default_name: str = "pipeline") -> PipelineRecipe:
    """A pipeline from a plain mapping. ValueError for an unknown key or a missing section."""
    return read(PipelineRecipe, with_name(written, default_name))


def run_pipeline(recipe: PipelineRecipe, overwrite: bool = False) -> dict[str, Facts]:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder: stage → facts. ``overwrite`` begins
    anew.

    Raises:
        ValueError: another pipeline or something else in the folder, or a setting that does not fit.
        Interrupted: asked to stop; what is done is kept, and the same call goes on.
    """
    plan_of_pipeline(recipe, overwrite)  # a mistake leaves the folder as it was
    folder, earlier = recipe.output_dir, check_folder(recipe, overwrite)
    with working(recipe, new=not earlier) as stop:
        if overwrite:
            for name in read_marker(folder / RUN).get("stages", ()):
                (folder / f"{name}.json").unlink(missing_ok=True)
                shutil.rmtree(folder / name, ignore_errors=True)
        about: dict[str, Any] = {
            "name": recipe.name,
            "pipeline": PIPELINE,
            "stages": [one.name for one in recipe.stages],
        }
        about |= {"recipe": settings_of(recipe), "versions": versions(), "seconds": earlier.get("seconds", {})}

        def report(at: At, stage: str, seconds: float | None) -> None:
            if seconds is None:
                console.rule(stage)
            else:
                about["seconds"][stage] = round(seconds, 1)
                write_run(folder, {**about, "finished": False})

        write_run(folder, {**about, "finished": bool(earlier.get("finished"))})
        at = At(folder)
        carry_out(stages_of(recipe, stop), at, stop, report)
        write_run(folder, {**about, "finished": True})
        console.print(f"{folder}: {', '.join(at.facts)} are done", soft_wrap=True)
        return at.facts


def plan_of_pipeline(recipe: PipelineRecipe, overwrite: bool = False) -> Words:
    """What `grpo-lab pipeline` will do, in words. ValueError for what would stop it, as far as it can be known before a
    stage is done."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`grpo-lab pipeline` runs in one process; start it without `accelerate launch` or torchrun")
    check_folder(recipe, overwrite)
    facts = plan_of(stages_of(recipe, StopRequests(recipe.output_dir)))
    return {**facts, "done already": "" if overwrite else kept(recipe), "output folder": str(recipe.output_dir)}


def kept(recipe: PipelineRecipe) -> str:
    """What is there after Ctrl-C."""
    done = [one.name for one in recipe.stages if (recipe.output_dir / f"{one.name}.json").is_file()]
    return f"{', '.join(done)} in {recipe.output_dir} (the same command goes on)" if done else "nothing"


def check_folder(recipe: PipelineRecipe, overwrite: bool) -> dict[str, Any]:
    """What marks the folder, `{}` for a new one. ValueError for one that holds something else, or another pipeline."""
    found = record_of(recipe.output_dir, PIPELINE)
    if overwrite or not found:
        return {}
    refuse_other_settings(recipe.output_dir, found.get("recipe", {}), settings_of(recipe))
    return found


def settings_of(recipe: PipelineRecipe) -> dict[str, Any]:
    """What the stages' files follow from, each stage's under its name."""
    said = {name: value for name, value in plain_settings(recipe).items() if name not in MAY_CHANGE}
    return {**said, "stages": {one["name"]: one for one in said["stages"]}}


def stages_of(recipe: PipelineRecipe, stop: StopRequests) -> list[Stage]:
    """The entries as stages, each of its kind with its settings and inputs. ValueError for what does not fit."""
    ordered, kinds = (
        recipe.in_order(),
        {one.name: kind_of(one.stage, f"stages.{one.name}.stage") for one in recipe.stages},
    )
    found: list[Stage] = []
    for number, section in enumerate(ordered, 1):
        written: Mapping[str, Any] = section.settings
        for setting, wanted in section.inputs.items():
            written = _with(written, setting, _place(recipe, kinds, section.name, wanted))
        found.append(_stage(number, section, read(kinds[section.name], written, f"stages.{section.name}"), stop))
    return found


def _place(recipe: PipelineRecipe, kinds: Mapping[str, Any], name: str, wanted: str) -> str:
    """Where a thing will be that another stage leaves."""
    before, _, thing = wanted.partition(".")
    leaves = getattr(kinds[before], "leaves", {})
    if thing not in leaves:
        raise ValueError(f"`stages`: {name!r} takes {wanted!r}; {before!r} leaves {sorted(leaves) or 'nothing'}")
    return str(recipe.output_dir / before / leaves[thing])


def _with(written: Mapping[str, Any], setting: str, value: str) -> dict[str, Any]:
    section, _, rest = setting.partition(".")
    return {**written, section: _with(written.get(section) or {}, rest, value) if rest else value}


def _stage(number: int, section: StageSection, kind: Any, stop: StopRequests) -> Stage:
    def run(at: At) -> Any:
        folder = at.folder / section.name
        folder.mkdir(exist_ok=True)
        try:
            return kind.run(Work(folder=folder, facts=at.facts, stop=stop))
        except Interrupted:  # of a command within this one: who asked may have asked this one
            stop.check()
            raise

    def plan() -> Words:
        words = kind.plan() if hasattr(kind, "plan") else ""
        return {f"{number}. {section.name}": f"{section.stage}{': ' if words else ''}{words}"}

    return Stage(section.name, run, plan, tuple({wanted.partition(".")[0] for wanted in section.inputs.values()}))
