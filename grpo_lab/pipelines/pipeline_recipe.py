"""Recipe of a pipeline: its stages, each with a kind, a name, inputs, and settings of its own or from a file.

    stages:
      - {stage: sample, name: samples, model: runs/start, data: {loader: word_problems, n: 100}, n_samples: 4}
      - {stage: rl, name: rl, recipe: team/rl.yaml, inputs: {model.path: start.model}, launch: team/ddp.yaml}

docs/pipelines.md describes every key. A file of one stage (``stage`` and its settings, no ``stages``) is a pipeline of
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_lab.recipe.sections import with_name
from grpo_lab.recipe.yaml import check_folder_name, read_yaml
from grpo_lab.runs.differences import plain_settings
from grpo_lab.settings import Hours, Whole, did_you_mean, must_be, read, settings

RECIPE = "pipeline.yaml"
"""File in the output folder with the pipeline as it was read. `resume` reads it."""
OF_A_FOLDER = "a folder's name: 1 to 100 letters, digits, - and _"
OWN = ("stage", "name", "inputs", "launch", "slurm", "recipe")
"""Keys of an entry in ``stages`` that every kind has; all others are settings of its kind."""


@settings(rest="settings")
class StageSection:
    """One entry of ``stages``.

    Attributes:
        stage: its kind, of ``pipelines/kinds.py``, or a team's as ``module:attribute``.
        name: name of the stage and of its folder.
        inputs: setting → ``<stage>.<thing>``, what an earlier stage leaves.
        launch: accelerate file, by which the stage runs on several processes; None: it runs in one.
        slurm: options of `sbatch` for this stage.
        settings: all other keys: settings of the kind.
    """

    stage: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$"), must_be(OF_A_FOLDER)]
    inputs: Mapping[str, str] = field(default_factory=dict)
    launch: str | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def before(self) -> tuple[str, ...]:
        """The stages that inputs are taken from, each once."""
        return tuple(dict.fromkeys(wanted.partition(".")[0] for wanted in self.inputs.values()))


@settings()
class PipelineRecipe:
    """Recipe of a whole pipeline.

    Attributes:
        name: name of the pipeline.
        output_dir: folder of the pipeline, in which each stage has a folder of its own.
        stages: its stages, in any order.
        seed: seed of every stage that has one and does not set it; loaders of rows keep their own.
        max_hours, stop_file: as in a recipe of `grpo-lab train` (docs/resume.md).
        slurm: options of `sbatch` for every stage (``--submit slurm``); a stage's own replace them.
    """

    name: str
    output_dir: Path
    stages: Annotated[tuple[StageSection, ...], Field(min_length=1)]
    seed: Whole | None = None
    max_hours: Hours | None = None
    stop_file: str | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [one.name for one in self.stages]
        taken = [name for name in names if names.count(name) > 1 or name in ("run", "pipeline", "slurm")]
        if taken:
            raise ValueError(f"`stages` has {taken[0]!r} twice, or it is a name of the folder's own; choose another")

    def in_order(self) -> list[StageSection]:
        """List the stages in the order in which they run: each after those that it takes inputs from, and otherwise in
        the order of the recipe. Raises ValueError for a cycle, or an input from a stage that does not exist."""
        named = {one.name: one for one in self.stages}
        for one in self.stages:
            for setting, wanted in one.inputs.items():
                before = wanted.partition(".")[0]
                if before not in named:
                    raise ValueError(
                        f"`stages`: {one.name!r} takes `{setting}` from {wanted!r}, and no stage is called {before!r}"
                        f"{did_you_mean(before, named)}"
                    )
        try:
            TopologicalSorter({name: one.before for name, one in named.items()}).prepare()
        except CycleError as error:
            raise ValueError(f"`stages`: each of {error.args[1]} waits for the next") from error
        ordered: dict[str, StageSection] = {}
        while len(ordered) < len(named):
            ready = (one for one in self.stages if one.name not in ordered and ordered.keys() >= {*one.before})
            first = next(ready)
            ordered[first.name] = first
        return list(ordered.values())


def pipeline_from(given: Mapping[str, Any], default_name: str = "pipeline", beside: Path = Path()) -> PipelineRecipe:
    """Make a pipeline's recipe from a plain mapping, or from that of a single stage.

    ``default_name``: its name if it has none. ``beside``: folder of the recipe's file; a file that a stage names is
    looked for in the working directory, then there. Raises ValueError for an unknown key or a missing section.
    """
    if "stage" in given and "stages" not in given:
        given = _of_one_stage(given)
    stages = given.get("stages")
    if isinstance(stages, list):
        given = {**given, "stages": [_entry(one, beside) if isinstance(one, Mapping) else one for one in stages]}
    named = with_name(given, default_name)
    check_folder_name(named["output_dir"])
    return read(PipelineRecipe, named)


def _of_one_stage(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file of one stage as that of a pipeline. ``name`` and ``output_dir`` are the pipeline's; the stage is
    named after its kind."""
    of_pipeline = ("name", "output_dir")
    stage = {key: value for key, value in given.items() if key not in of_pipeline}
    stage["name"] = str(stage["stage"]).replace(":", "-").replace(".", "-")
    return {**{key: given[key] for key in of_pipeline if key in given}, "stages": [stage]}


def _entry(one: Mapping[str, Any], beside: Path) -> dict[str, Any]:
    """Return an entry of ``stages`` with the settings of the file that its ``recipe`` names, if it names one. Settings
    of the entry itself replace those of the file."""
    own = {name: value for name, value in one.items() if name in OWN}
    stage = f"stages.{one.get('name', '?')}"
    for name in ("recipe", "launch"):
        if own.get(name):
            own[name] = _file(own[name], f"{stage}.{name}", beside)
    file = own.pop("recipe", None)
    if not file:
        return {**one, **own}
    found = read_yaml(file, {name: value for name, value in one.items() if name not in OWN})
    of_kind = {name: value for name, value in found.items() if name not in ("name", "output_dir")}
    return {**of_kind, **own}


def _file(name: Any, setting: str, beside: Path) -> str:
    """Return the path of the file ``name``, as it is or in the folder ``beside``. Raises ValueError, which names
    ``setting``, if there is none."""
    for place in (Path(str(name)), beside / str(name)):
        if place.is_file():
            return str(place)
    raise ValueError(f"`{setting}` is {str(name)!r}: no such file here, nor in {str(beside)!r}")


def plain_recipe(recipe: PipelineRecipe) -> dict[str, Any]:
    """Return the mapping that `pipeline_from` reads back, with the settings of all files in it."""
    plain = plain_settings(recipe)
    plain["stages"] = [{**{key: one[key] for key in OWN if one.get(key)}, **one["settings"]} for one in plain["stages"]]
    return plain
