"""The kinds of stage that a pipeline's YAML may name: what each reads of its entry, does in its folder, and leaves
there.

A kind is a class of settings (`grpo_lab.settings.settings`) with

    run(at)   does it in ``at.folder`` and returns facts, which become the stage's marker (`runs.stage`)
    plan()    its words for ``--dry-run``; it may be left out
    leaves    what later stages can take, name → place in its folder (``{"model": "model"}``); it may be left out

One of a team's is named ``module:attribute`` (docs/recipes.md, "Adding a stage"). ``rl``, ``filter``, ``rounds`` and
``long2short`` are whole commands in a stage's folder: their recipe is the entry, and they go on by themselves where
they were killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from grpo_lab.curation import Sampled, average_weights
from grpo_lab.io import write_json_lines
from grpo_lab.pipelines.curate import curate
from grpo_lab.pipelines.curation_recipe import curation_recipe_from
from grpo_lab.pipelines.held_out import evaluate_saved_model
from grpo_lab.pipelines.in_words import settings_in_words, told
from grpo_lab.pipelines.long2short import long2short
from grpo_lab.pipelines.long2short_recipe import long2short_recipe_from
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.run_rounds import run_rounds
from grpo_lab.pipelines.sampler import ModelSampler, with_room
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.job import check_model, questions
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.rows import load_rows
from grpo_lab.recipe.sections import (
    STRICT_ACCURACY,
    DataSection,
    EvaluationSection,
    ModelSection,
    RewardSection,
    SamplingSettings,
    recipe_from,
)
from grpo_lab.registry import load_named
from grpo_lab.runs.stage import At
from grpo_lab.runs.stop import StopRequests
from grpo_lab.settings import NULL_IS_DEFAULT, Number, Positive, Switch, Whole, one_of, settings
from grpo_lab.stages.evaluate import measured
from grpo_lab.stages.sample import SAMPLES, read_lines, sample, sample_facts
from grpo_lab.stages.select import ROWS, Contrast, Keep, Shorter, Shortest, select
from grpo_lab.stages.train import MODEL, free, train_on, trained, training_rows
from grpo_lab.visible import encodable

Facts = dict[str, Any]


@dataclass(kw_only=True)
class Work(At):
    """Where one stage of a pipeline works, with the facts of those that are done.

    Args:
        stop: asked between two things that are done (``check``), and around a training.
    """

    stop: StopRequests


@settings(rest="sampling")
class Sample:
    """``sample``: completions of each row by a model, judged. Other keys: `SamplingSettings`."""

    leaves: ClassVar[Mapping[str, str]] = {"samples": SAMPLES}
    model: str
    data: DataSection
    reward: RewardSection = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def plan(self) -> str:
        found = questions(self.data, self.reward, here_only=True)
        count = "" if found.rows is None else f", {len(found.rows):,} rows"
        return f"{self.sampling.n_samples} a row of {told(self.data)}{count}, by {self.model}"

    def run(self, at: Work) -> Facts:
        asked = questions(self.data, self.reward)
        check_model(asked, ModelSection(path=self.model), self.sampling)
        rows = [dict(row) for row in asked.rows]

        def start() -> tuple[ModelSampler, list[int]]:
            sampler = ModelSampler(self.model, self.sampling)
            numbers = {id(row): number for number, row in enumerate(rows)}
            return sampler, [numbers[id(row)] for row in with_room(rows, sampler)]

        said = {"reward": told(self.reward)}
        lines = sample(rows, start, asked.reward, at.folder, at.stop, said, at.folder.name)
        write_json_lines(at.folder / SAMPLES, [{**line, "problem": encodable(rows[line["row"]])} for line in lines])
        free()
        return sample_facts(lines, len(rows))


@settings()
class Select:
    """``select``: rows to train on out of samples; exactly one of the four ways (`stages.select`)."""

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    samples: str
    keep: Keep | None = None
    contrast: Contrast | None = None
    shortest: Shortest | None = None
    shorter: Shorter | None = None

    def __post_init__(self) -> None:
        if len(self._ways()) != 1:
            raise ValueError("a stage `select` needs exactly one of `keep`, `contrast`, `shortest` and `shorter`")

    def _ways(self) -> list[Any]:
        return [way for way in (self.keep, self.contrast, self.shortest, self.shorter) if way is not None]

    def plan(self) -> str:
        return f"{type(self._ways()[0]).__name__.lower()} {told(self._ways()[0])}".strip()

    def run(self, at: Work) -> Facts:
        samples = [
            Sampled(line["problem"]["prompt"], line["completions"], line["scores"], line["lengths"], line["problem"])
            for line in read_lines(Path(self.samples))
        ]
        rows, counts = select(samples, self._ways()[0])
        if not rows:
            raise ValueError(f"no row out of {len(samples)} problems: sample more, or select otherwise")
        write_json_lines(at.folder / ROWS, [encodable(row) for row in rows])
        return {**counts, "rows": len(rows)}


@settings(rest="training")
class Train:
    """``sft``, ``dpo``, ``simpo``: a model trained on selected ``rows``. Other keys: TRL's ``SFTConfig``,
    ``DPOConfig``, ``CPOConfig``."""

    leaves: ClassVar[Mapping[str, str]] = {"model": MODEL}
    method: ClassVar[str] = "sft"
    model: str
    rows: str
    seed: Whole = 0
    training: Annotated[Mapping[str, Any], NULL_IS_DEFAULT] = field(default_factory=dict)

    def plan(self) -> str:
        from grpo_lab.trainer.supervised.preference import check_training

        check_training("shortest_sft" if self.method == "sft" else self.method, self.training)
        return f"{self.model} on {self.rows}; {settings_in_words(self.training)}"

    def run(self, at: Work) -> Facts:
        model, tokenizer = load_model(ModelSection(path=self.model), self.seed)
        rows = training_rows(self.method, read_lines(Path(self.rows)))
        arguments = {"seed": self.seed, **self.training}
        with trained(at.folder, tokenizer, rows, [self.model, arguments], at.stop) as (folder, training, counted):
            train_on(self.method, model, tokenizer, rows, folder, arguments, training, [counted])
        del model
        free()
        return counted.facts()


@settings(rest="training")
class Dpo(Train):
    """``dpo``: on pairs; the reference is the model as it begins."""

    method: ClassVar[str] = "dpo"


@settings(rest="training")
class Simpo(Train):
    """``simpo``: on pairs, without a reference."""

    method: ClassVar[str] = "simpo"


@settings(rest="training")
class ColdStart:
    """``cold_start``: a model, or a tiny one from config, trained on worked solutions. Other keys: TRL's
    ``SFTConfig``."""

    leaves: ClassVar[Mapping[str, str]] = {"model": MODEL}
    model: ModelSection
    data: DataSection
    seed: Whole = 0
    training: Annotated[Mapping[str, Any], NULL_IS_DEFAULT] = field(default_factory=dict)

    def plan(self) -> str:
        from grpo_lab.trainer.supervised.cold_start import check_cold_start

        check_cold_start(self.training)
        return f"{self.model.name} on {told(self.data)}; {settings_in_words(self.training)}"

    def run(self, at: Work) -> Facts:
        from grpo_lab.trainer.supervised.cold_start import cold_start

        model, tokenizer = load_model(self.model, self.seed)
        rows, arguments = load_rows(self.data, "data"), {"seed": self.seed, **self.training}
        made_from = [asdict(self.model), arguments]
        with trained(at.folder, tokenizer, rows.to_list(), made_from, at.stop) as (folder, training, counted):
            cold_start(model, tokenizer, rows, folder, arguments, [counted], training)
        del model
        free()
        return counted.facts()


@settings()
class Merge:
    """``merge``: the average of two models' weights (`average_weights`)."""

    leaves: ClassVar[Mapping[str, str]] = {"model": MODEL}
    model: str
    short_model: str
    alpha: Number = 0.5

    def plan(self) -> str:
        return f"{self.alpha:g} of {self.model}, the rest of {self.short_model}"

    def run(self, at: Work) -> Facts:
        shutil.rmtree(at.folder / MODEL, ignore_errors=True)  # of a run that was killed before its marker
        average_weights(self.model, self.short_model, at.folder / MODEL, self.alpha)
        return {}


@settings(rest="section")
class Evaluate:
    """``evaluate``: a model on held-out rows. Other keys: those of a recipe's ``evaluation``, but ``before``."""

    model: str
    section: EvaluationSection
    seed: Whole = 0
    use_cpu: Switch = False
    max_completion_length: Positive = 512

    def plan(self) -> str:
        found = questions(self.section.data, self.section.reward, here_only=True)
        count = "" if found.rows is None else f", {len(found.rows):,} rows"
        return f"{self.model} on {told(self.section.data)}{count}, judged by {told(self.section.reward)}"

    def run(self, at: Work) -> Facts:
        limit = self.max_completion_length
        result = evaluate_saved_model(
            self.model, self.section, None, use_cpu=self.use_cpu, max_new_tokens=limit, seed=self.seed
        )
        free()
        return measured(result, at.folder)


@settings(rest="recipe")
class Rl:
    """``rl``: the recipe of `grpo-lab train`; its training goes on by itself, from its checkpoints."""

    leaves: ClassVar[Mapping[str, str]] = {"model": "."}
    read_recipe: ClassVar[Any] = staticmethod(recipe_from)
    do: ClassVar[Any] = staticmethod(train)
    recipe: Mapping[str, Any]

    def plan(self) -> str:
        self.read_recipe({**self.recipe, "output_dir": "."})
        return ", ".join(
            f"{name} {value}" for name, value in self.recipe.items() if not isinstance(value, Mapping | list)
        )

    def run(self, at: Work) -> Facts:
        self.do(self.read_recipe({"name": at.folder.name, **self.recipe, "output_dir": str(at.folder)}))
        return {}


@settings(rest="recipe")
class Filter(Rl):
    """``filter``: the recipe of `grpo-lab curate`."""

    leaves: ClassVar[Mapping[str, str]] = {"rows": "curated.jsonl"}
    read_recipe: ClassVar[Any] = staticmethod(curation_recipe_from)
    do: ClassVar[Any] = staticmethod(curate)


@settings(rest="recipe")
class Rounds(Rl):
    """``rounds``: the recipe of `grpo-lab rounds`."""

    read_recipe: ClassVar[Any] = staticmethod(rounds_recipe_from)
    do: ClassVar[Any] = staticmethod(run_rounds)


@settings(rest="recipe")
class Long2Short(Rl):
    """``long2short``: the recipe of `grpo-lab long2short`."""

    read_recipe: ClassVar[Any] = staticmethod(long2short_recipe_from)
    do: ClassVar[Any] = staticmethod(long2short)


KINDS: dict[str, Any] = {
    "cold_start": ColdStart,
    "sample": Sample,
    "select": Select,
    "sft": Train,
    "dpo": Dpo,
    "simpo": Simpo,
    "merge": Merge,
    "evaluate": Evaluate,
    "rl": Rl,
    "filter": Filter,
    "rounds": Rounds,
    "long2short": Long2Short,
}


def kind_of(name: str, where: str) -> Any:
    """The kind called ``name``, or a team's at ``module:attribute``. ValueError for one that is neither, or cannot be
    run."""
    if ":" not in name:
        if name not in KINDS:
            raise ValueError(f"`{where}` is {name!r}{one_of(name, KINDS)}, or 'module:attribute'")
        return KINDS[name]
    kind = load_named(name, where)
    if not (isinstance(kind, type) and callable(getattr(kind, "run", None))):
        raise ValueError(
            f"`{where}` is {name!r}; a kind of stage is a class of `grpo_lab.settings.settings` with `run(at)`"
        )
    return kind
