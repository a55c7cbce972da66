"""The kinds of stage that a pipeline's YAML can name, and a team's own at ``module:attribute``.

A kind is a class of settings (`grpo_lab.settings.settings`) with

    run(at)   does it in ``at.folder`` (`runs.stage.At`) and returns facts: the results in its `stage.json`
    plan()    its words for ``--dry-run``; it may be left out, as the rest
    leaves    what later stages can take, name → place in its folder (``{"model": "model"}``)
    whole     true: asked to stop, it is broken off and done again
    ranks     true: it can be started by `accelerate launch` on several processes (``launch``)
    locks     true: it keeps a second process out of its folder by itself
    no_matter names of settings that change nothing of what it leaves
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from grpo_lab.evaluation.run_record import read_run
from grpo_lab.pipelines.curate import Curated, curate, curation_recipe_from
from grpo_lab.pipelines.long2short import Shortened, long2short, long2short_recipe_from
from grpo_lab.pipelines.rounds import run_rounds
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.run_folder import CANNOT_CHANGE_THE_PAST, LENGTH
from grpo_lab.pipelines.train import TrainingOutcome, train
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.registry import load_named
from grpo_lab.runs.stage import At, Facts
from grpo_lab.runs.stop import Interrupted
from grpo_lab.settings import one_of, settings
from grpo_lab.stages.build import Build
from grpo_lab.stages.evaluate import Evaluate
from grpo_lab.stages.fusion import Fusion
from grpo_lab.stages.sample import Sample
from grpo_lab.stages.select import Select
from grpo_lab.stages.traces import FilterTraces
from grpo_lab.stages.train import ColdStart, Distill, Dpo, Merge, RewardModel, Simpo, Train


def whole_command(read_recipe: Any, do: Any, facts: Callable[[Any], Facts], **left: str) -> Any:
    """A kind that is a command: its recipe is the entry, and killed in the stage's folder it goes on by itself.
    ``facts``: of what the command returns; ``left``: what it ``leaves``."""

    @settings(rest="recipe")
    class WholeCommand:
        """``rl``, ``curate``, ``rounds``, ``long2short``: the recipe of `grpo-lab train`, `curate`, …"""

        leaves: ClassVar[Mapping[str, str]] = left
        locks: ClassVar[bool] = True
        ranks: ClassVar[bool] = do is train
        no_matter: ClassVar[Collection[str]] = CANNOT_CHANGE_THE_PAST.difference(LENGTH) if do is train else ()
        recipe: Mapping[str, Any]

        def as_read(self) -> Any:
            return read_recipe({**self.recipe, "output_dir": "."})

        def plan(self) -> str:
            self.as_read()
            plain = {name: value for name, value in self.recipe.items() if not isinstance(value, Mapping | list)}
            return ", ".join(f"{name} {value}" for name, value in plain.items())

        def run(self, at: At) -> Facts:
            try:
                return facts(do(read_recipe({"name": at.folder.name, **self.recipe, "output_dir": str(at.folder)})))
            except Interrupted:  # who asked may have asked the pipeline
                at.stop.check()
                raise

    return WholeCommand


def _measured(done: TrainingOutcome | Shortened) -> Facts:
    found = done.after
    return {"accuracy": found.accuracy.value, "length": found.mean_length} if found and found.accuracy else {}


def _of_curation(done: Curated) -> Facts:
    return {"rows": len(done.rows), "dropped": {one.name: one.dropped for one in done.report.filters}}


def _of_rounds(lines: Sequence[Mapping[str, Any]]) -> Facts:
    return {"rounds": len(lines) - 1, "accuracy": (lines[-1].get("accuracy") or {}).get("value")}


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
    "evaluate": Evaluate,
    "rl": whole_command(
        recipe_from, train, lambda done: {"steps": read_run(done.folder).last_step, **_measured(done)}, model="."
    ),
    "curate": whole_command(curation_recipe_from, curate, _of_curation, rows="curated.jsonl"),
    "rounds": whole_command(rounds_recipe_from, run_rounds, _of_rounds, model="."),
    "long2short": whole_command(
        long2short_recipe_from, long2short, lambda done: {"rows": done.rows, **_measured(done)}, model="."
    ),
}


def kind_of(name: str, where: str) -> Any:
    """The kind called ``name``, or a team's at ``module:attribute``. ValueError for one that cannot be run."""
    if ":" not in name and name not in KINDS:
        raise ValueError(f"`{where}` is {name!r}{one_of(name, KINDS)}, or 'module:attribute'")
    kind = KINDS[name] if name in KINDS else load_named(name, where)
    if not (isinstance(kind, type) and callable(getattr(kind, "run", None))):
        raise ValueError(f"`{where}` is {name!r}; a kind of stage is a class of `@settings()` with `run(at)`")
    return kind
