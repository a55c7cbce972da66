"""The stages of a round (`rounds.py`): sample, select, train, evaluate; and of the start, train and evaluate."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from grpo_lab.curation import Sampled
from grpo_lab.io import whole_folder, write_json_lines
from grpo_lab.pipelines import rounds_plan as words
from grpo_lab.pipelines.held_out import evaluate_saved_model
from grpo_lab.pipelines.in_words import told
from grpo_lab.pipelines.rounds import Round
from grpo_lab.pipelines.rounds_recipe import IMITATE, ContrastSettings, RoundsRecipe, seed_of
from grpo_lab.pipelines.sampler import ModelSampler, with_room
from grpo_lab.recipe.job import Questions
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import ModelSection
from grpo_lab.runs.stage import Stage
from grpo_lab.runs.stop import StopRequests
from grpo_lab.stages.evaluate import measured
from grpo_lab.stages.sample import SAMPLES, read_lines, sample, sample_facts
from grpo_lab.stages.select import GOLD, ROWS, Keep, select
from grpo_lab.stages.train import MODEL, TrainingFacts, finish, free, train_on, trained, training_rows


class RoundParts:
    """What the rounds of one recipe do, with its rows and its reward."""

    def __init__(
        self, recipe: RoundsRecipe, asked: Questions, cold_rows: Any = None, stop: StopRequests | None = None
    ) -> None:
        self.recipe, self.stop = recipe, stop or StopRequests(recipe.output_dir)
        self.asked, self.cold_rows = asked, cold_rows

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.asked.rows]

    def of_start(self) -> list[Stage]:
        """The start model is made where the recipe makes one, and measured where it has held-out rows."""
        recipe = self.recipe
        made = [Stage("train", self.begin)] if recipe.model.path is None or recipe.cold_start else []
        measured = recipe.evaluation is not None and recipe.evaluation.before
        return made + ([Stage("evaluate", self.evaluate, whole=True)] if measured else [])

    def of_round(self) -> list[Stage]:
        recipe, asked = self.recipe, self.asked
        count = None if asked.rows is None else len(asked.rows)
        stages = [
            Stage("sample", self.sample, lambda: {"1. sample": words.sample(recipe, count)}),
            Stage("select", self.select, lambda: {"2. select": words.select(recipe)}, inputs=("sample",)),
            Stage("train", self.train, lambda: {"3. train": words.train(recipe)}, inputs=("select",)),
        ]
        if recipe.evaluation is not None:
            plan = lambda: {"4. evaluate": words.evaluation(recipe, asked.held_out)}  # noqa: E731
            stages.append(Stage("evaluate", self.evaluate, plan, whole=True))
        return stages

    def begin(self, at: Round) -> dict[str, Any]:
        """The start model: built from config, or loaded, and given its cold start."""
        recipe, seed = self.recipe, self.recipe.sampling.seed
        model, tokenizer = load_model(recipe.model, seed)
        if recipe.cold_start is None:
            with whole_folder(at.folder / MODEL) as folder:
                model.save_pretrained(folder)
                finish(folder, tokenizer)
            return TrainingFacts(at.folder / "metrics.jsonl").facts()
        from grpo_lab.trainer.supervised.cold_start import cold_start

        rows = self.cold_rows
        arguments = {"seed": seed, "use_cpu": recipe.sampling.use_cpu, **recipe.cold_start.arguments}
        with trained(at.folder, tokenizer, rows.to_list(), arguments, self.stop) as (folder, training, counted):
            cold_start(model, tokenizer, rows, folder, arguments, [counted], training)
        del model
        free()
        return counted.facts()

    def sample(self, at: Round) -> dict[str, Any]:
        """`samples.jsonl`: n completions of each of the round's questions by the current model, scored."""
        sampling = self.recipe.sampling
        asked = questions_of(at.number, len(self.rows), self.recipe.rounds.questions, sampling.seed)

        def start() -> tuple[ModelSampler, list[int]]:
            sampler = ModelSampler(at.current, replace(sampling, seed=seed_of(sampling.seed, at.number, "sample")))
            numbers = {id(self.rows[row]): row for row in asked}
            return sampler, [numbers[id(row)] for row in with_room([self.rows[row] for row in asked], sampler)]

        said = {"model": None, "reward": told(self.recipe.reward)}  # which model, its files say
        label = f"round {at.number}: samples"
        lines = sample(self.rows, start, self.asked.reward, at.folder, self.stop, said, label)
        free()
        return sample_facts(lines, len(asked))

    def select(self, at: Round) -> dict[str, Any]:
        """`rows.jsonl`: what the round is trained on. ValueError where nothing can be."""
        samples = [self._problem(line) for line in read_lines(at.folder / SAMPLES)]
        imitate = self.recipe.method in IMITATE
        how = self.recipe.keep or Keep() if imitate else self.recipe.pairs or ContrastSettings()
        rows, counts = select(samples, how)
        if not rows:
            needed = "right on some" if imitate else "right and wrong on the same"
            raise ValueError(
                f"round {at.number}: no row for `method: {self.recipe.method}` out of {len(samples)} problems: of "
                f"{counts['samples']} "
                f"samples {counts['scored']} could be scored and {counts['right']} are right, and the model has to "
                f"be {needed}. Raise "
                "`n_samples` or `rounds.questions`, or take other `data` (or `reward`, where nothing could be "
                "scored), in another "
                f"`output_dir` or with --overwrite; the model so far is {at.current}"
            )
        write_json_lines(at.folder / ROWS, rows)
        return {**counts, "rows": len(rows)}

    def _problem(self, line: Mapping[str, Any]) -> Sampled:
        row = self.rows[line["row"]]
        return Sampled(row["prompt"], line["completions"], line["scores"], line["lengths"], row)

    def train(self, at: Round) -> dict[str, Any]:
        """`model/`: TRL's trainer on the round's rows, from the last model or from the base; a fresh optimizer."""
        recipe = self.recipe
        base = recipe.base.path if recipe.base is not None else at.start
        begin = at.current if recipe.rounds.train_from == "last" else str(base)
        model, tokenizer = load_model(ModelSection(path=begin), recipe.sampling.seed)
        rows = training_rows(recipe.method, read_lines(at.folder / ROWS))
        seed = seed_of(recipe.sampling.seed, at.number, "train")
        arguments = {"seed": seed, "use_cpu": recipe.sampling.use_cpu, **recipe.training}
        with trained(at.folder, tokenizer, rows, [begin, arguments], self.stop) as (folder, training, counted):
            reference = self._reference(at)
            train_on(recipe.method, model, tokenizer, rows, folder, arguments, training, [counted], reference)
        del model
        free()
        return {"from": "base" if begin != at.current else "last", **counted.facts()}

    def _reference(self, at: Round) -> Any:
        """DPO's, where it is not the model that the round trains, as it begins."""
        recipe = self.recipe
        if recipe.method != "dpo" or recipe.pairs is None or recipe.pairs.reference != "base":
            return None
        return load_model(ModelSection(path=at.start), recipe.sampling.seed)[0]

    def evaluate(self, at: Round) -> dict[str, Any]:
        """`evaluation/`: the model that the round leaves on the held-out rows. Without its seconds, which no two runs
        share."""
        recipe = self.recipe
        assert recipe.evaluation is not None
        result = evaluate_saved_model(
            at.model,
            recipe.evaluation,
            None,
            use_cpu=recipe.sampling.use_cpu,
            max_new_tokens=recipe.sampling.max_completion_length,
            seed=recipe.sampling.seed,
        )
        free()
        return measured(result, at.folder)


def check_rows(recipe: RoundsRecipe, rows: Any) -> None:
    """ValueError for rows that the recipe cannot be run on."""
    if recipe.keep is not None and recipe.keep.gold and GOLD not in rows.column_names:
        raise ValueError(f"`keep.gold` needs a column {GOLD!r} in `data`; it has {rows.column_names}")
    asked = recipe.rounds.questions
    if asked is not None and asked > len(rows):
        raise ValueError(
            f"`rounds.questions` is {asked} and `data` has {len(rows)} rows; ask fewer, or leave it out for all"
        )


def questions_of(number: int, total: int, asked: int | None, seed: int) -> list[int]:
    """The rows that round ``number`` (from 1) asks: all, or the next ``asked`` of an order that is drawn anew when
    fewer are left."""
    if asked is None:
        return list(range(total))
    lap, place = divmod(number - 1, total // asked)
    order = random.Random(f"{seed}/questions/{lap}").sample(range(total), total)
    return order[place * asked : (place + 1) * asked]
