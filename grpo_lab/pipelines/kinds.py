"""The kinds of stage that a pipeline's YAML can name; a team's own is named as ``module:attribute``.

A kind is a class of settings (`grpo_lab.settings.settings`); its fields are the stage's settings. It has these methods
and attributes, of which all but ``run`` are optional:

    run        `run(workspace)` does the stage's work in ``workspace.folder`` (`runs.stage.Workspace`) and returns
               facts: the results that its `stage.json` records
    plan       `plan()` describes the stage in words for ``--dry-run``
    leaves     what later stages can take: name → place in the stage's folder (``{"model": "model"}``)
    perhaps    names in ``leaves`` that exist only under some settings
    keeps      places in the stage's folder of results that no stage takes; if one is lost, the stage runs again there
    whole      true: a stop ends the stage anywhere, and it is done again from its beginning
    ranks      true: the stage can be started by `accelerate launch` on several processes (``launch``)
    seed       default of the stage's seed, if it draws something; a pipeline's ``seed`` takes its place
    locks      true: the stage itself keeps a second process out of its folder
    no_matter  names of settings that change nothing of what the stage leaves
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from grpo_lab.evaluation.run_record import read_run
from grpo_lab.pipelines.curate import Curated, curate, curation_recipe_from, plan_of_curation
from grpo_lab.pipelines.dry_run import plan_of_training
from grpo_lab.pipelines.long2short import Shortened, long2short, long2short_recipe_from, plan_of_long2short
from grpo_lab.pipelines.rounds import plan_of_rounds, run_rounds
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.same_run import CANNOT_CHANGE_THE_PAST, LENGTH
from grpo_lab.pipelines.train import TrainingOutcome, train
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.registry import load_named
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.runs.stop_requests import Interrupted
from grpo_lab.settings import one_of, settings
from grpo_lab.stages.held_out import EVALUATION, Evaluate
from grpo_lab.stages.mix import Build, Fusion
from grpo_lab.stages.sample import Sample
from grpo_lab.stages.select import Select
from grpo_lab.stages.step_labels import StepLabels
from grpo_lab.stages.supervised import ColdStart, Distill, Dpo, Merge, RewardModel, Simpo, StepRewardModel, Train
from grpo_lab.stages.traces import FilterTraces
from grpo_lab.trainer.scoring.preference_training import FOLDER


def whole_command(read_recipe: Any, do: Any, plan: Any, facts: Callable[[Any], Facts], **left: str) -> Any:
    """Make a kind of stage from a command: the stage's settings are the command's recipe. After a kill the command
    itself continues in the stage's folder.

    Args:
        read_recipe: makes the command's recipe from a mapping.
        do: runs a recipe.
        plan: checks a recipe, as the command's ``--dry-run`` does.
        facts: makes the stage's results from what ``do`` has returned.
        left: what the kind ``leaves``.
    """

    @settings(rest="recipe")
    class WholeCommand:
        """Kind ``rl``, ``curate``, ``rounds`` or ``long2short``. Its settings are the recipe of `grpo-lab train`,
        `curate`, `rounds` or `long2short`, without ``output_dir``."""

        leaves: ClassVar[Mapping[str, str]] = left
        keeps: ClassVar[Collection[str]] = (EVALUATION,)
        perhaps: ClassVar[Collection[str]] = ("preference",)
        locks: ClassVar[bool] = True
        ranks: ClassVar[bool] = do is train
        seed = None  # the recipe has its own
        if do is train:
            no_matter: ClassVar[Collection[str]] = CANNOT_CHANGE_THE_PAST.difference(LENGTH)
        else:
            no_matter = ()
        recipe: Mapping[str, Any]

        def __post_init__(self) -> None:
            if "output_dir" in self.recipe:
                raise ValueError("`output_dir` has no effect: a stage works in the pipeline's folder of its name")

        def as_read(self) -> Any:
            """Return the command's recipe, for estimates and for the checks of later stages."""
            return read_recipe({**self.recipe, "output_dir": "."})

        def plan(self) -> str:
            """Check the recipe as the command's dry run does; return its settings that are single values, in words."""
            with TemporaryDirectory() as folder:  # `pipelines.standing` looks at the stage's own folder
                plan(read_recipe({"name": "stage", **self.recipe, "output_dir": folder}))
            plain = {name: value for name, value in self.recipe.items() if not isinstance(value, Mapping | list)}
            return ", ".join(f"{name} {value}" for name, value in plain.items())

        def run(self, workspace: Workspace) -> Facts:
            folder = workspace.folder
            recipe = read_recipe({"name": folder.name, **self.recipe, "output_dir": str(folder)})
            try:
                return facts(do(recipe))
            except Interrupted:  # `check` raises the pipeline's own, if it was asked too
                workspace.stop.check()
                raise

    return WholeCommand


def _of_training(done: TrainingOutcome) -> Facts:
    """Return the results of a training: steps, tokens, and the means of reward and completion length in the last ten
    logs. An evaluation at the end adds its accuracy, and its completion length replaces that of the logs."""
    run = read_run(done.folder)
    last = {"reward": run.first_of("reward"), "length": run.first_of("completions/mean_length")}
    means = {name: fmean(value for _, value in series[-10:]) for name, series in last.items() if series}
    return {"steps": run.summary["trained"], "tokens": run.summary.get("tokens"), **means, **_measured(done)}


def _measured(done: TrainingOutcome | Shortened) -> Facts:
    """Return accuracy and mean completion length (tokens) of the evaluation at the end, if there was one."""
    found = done.after
    if found and found.accuracy:
        return {"accuracy": found.accuracy.value, "length": found.mean_length}
    return {}


def _of_curation(done: Curated) -> Facts:
    dropped = {one.name: one.dropped for one in done.report.filters}
    return {"rows": done.report.kept, "out_of": done.report.kept + sum(dropped.values()), "dropped": dropped}


def _of_rounds(lines: Sequence[Mapping[str, Any]]) -> Facts:
    last = lines[-1]
    return {"rounds": len(lines) - 1, "tokens": last["tokens_total"], "accuracy": last["accuracy"]}


KINDS: dict[str, Any] = {
    "cold_start": ColdStart,
    "sample": Sample,
    "select": Select,
    "fusion": Fusion,
    "sft": Train,
    "dpo": Dpo,
    "simpo": Simpo,
    "distill": Distill,
    "merge": Merge,
    "filter": FilterTraces,
    "build": Build,
    "reward_model": RewardModel,
    "step_labels": StepLabels,
    "step_reward_model": StepRewardModel,
    "evaluate": Evaluate,
    "rl": whole_command(recipe_from, train, plan_of_training, _of_training, model=".", preference=FOLDER),
    "curate": whole_command(curation_recipe_from, curate, plan_of_curation, _of_curation, rows="curated.jsonl"),
    "rounds": whole_command(rounds_recipe_from, run_rounds, plan_of_rounds, _of_rounds, model="."),
    "long2short": whole_command(
        long2short_recipe_from,
        long2short,
        plan_of_long2short,
        lambda done: {"rows": done.rows, **_measured(done)},
        model=".",
    ),
}


def kind_of(name: str, where: str) -> Any:
    """Return the kind called ``name``, or a team's at ``module:attribute``. Raises ValueError, which names the setting
    ``where``, if there is no such kind, or it is no class with `run`."""
    if ":" not in name and name not in KINDS:
        raise ValueError(f"`{where}` is {name!r}{one_of(name, KINDS)}, or 'module:attribute'")
    kind = KINDS[name] if name in KINDS else load_named(name, where)
    if not (isinstance(kind, type) and callable(getattr(kind, "run", None))):
        raise ValueError(f"`{where}` is {name!r}; a kind of stage is a class of `@settings()` with `run(workspace)`")
    return kind
