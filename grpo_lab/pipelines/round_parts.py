"""The stages of a round (`rounds.py`): sample, select, train, evaluate; and of the start, train and evaluate."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.curation import Sampled
from grpo_lab.io import whole_folder, write_json_lines
from grpo_lab.pipelines import rounds_plan as words
from grpo_lab.pipelines.held_out import evaluate_saved_model
from grpo_lab.pipelines.in_words import told
from grpo_lab.pipelines.resume import cut_metrics
from grpo_lab.pipelines.round_selection import questions_of, selected
from grpo_lab.pipelines.rounds import MODEL, Round
from grpo_lab.pipelines.rounds_recipe import IMITATE, RoundsRecipe, seed_of
from grpo_lab.pipelines.run_folder import MetricsFile
from grpo_lab.pipelines.sampler import ModelSampler, with_room
from grpo_lab.recipe.job import Questions
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import ModelSection
from grpo_lab.runs.stage import Stage
from grpo_lab.runs.stop import StopRequests, identity_of
from grpo_lab.stages.sample import judged_samples, trim_to_whole_batches
from grpo_lab.stages.train import train_on, training_rows
from grpo_lab.trainer.supervised.stoppable import StoppableTraining
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

STOPPED = "stopped"
"""A training that was asked to stop: its checkpoint, until it has come to its end."""
SAMPLES, SAMPLING, ROWS = "samples.jsonl", "sampling.jsonl", "rows.jsonl"
"""All samples of a round; those made so far (gone when the former is there); what is trained on."""
WEIGHT = "rewards/weight"


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
        counted = _Counted(at.folder / "metrics.jsonl")
        if recipe.cold_start is None:
            with whole_folder(at.folder / MODEL) as folder:
                model.save_pretrained(folder)
                _finish(folder, tokenizer)
        else:
            from grpo_lab.trainer.supervised.cold_start import cold_start

            rows = self.cold_rows
            arguments = {"seed": seed, "use_cpu": recipe.sampling.use_cpu, **recipe.cold_start.arguments}
            with self._trained(at, tokenizer, rows.to_list(), arguments, counted) as (folder, training):
                cold_start(model, tokenizer, rows, folder, arguments, [counted], training)
        _free()
        return counted.facts()

    def sample(self, at: Round) -> dict[str, Any]:
        """`samples.jsonl`: n completions of each of the round's questions by the current model, scored."""
        file, progress = at.folder / SAMPLES, at.folder / SAMPLING
        asked = questions_of(at.number, len(self.rows), self.recipe.rounds.questions, self.recipe.sampling.seed)
        if not file.is_file():
            write_json_lines(file, self._sampled(at, asked, progress))
        progress.unlink(missing_ok=True)
        return _sample_facts(_lines(file), len(asked))

    def _sampled(self, at: Round, asked: list[int], progress: Path) -> list[dict[str, Any]]:
        settings = replace(self.recipe.sampling, seed=seed_of(self.recipe.sampling.seed, at.number, "sample"))
        sampler = ModelSampler(at.current, settings)
        numbers = {id(self.rows[row]): row for row in asked}
        problems = with_room([self.rows[row] for row in asked], sampler)
        trim_to_whole_batches(progress, settings.problems_per_save)
        said = {"model": None, "reward": told(self.recipe.reward)}  # which model, its files say
        label = f"round {at.number}: samples"
        rates = judged_samples(problems, sampler, self.asked.reward, progress, self.stop, said, label)
        found = [
            {
                "row": numbers[id(problem)],
                "scores": list(rate.scores),
                "lengths": [sampler.tokens(one) for one in rate.completions or ()],
                "cut": rate.cut,
                "completions": [encodable(one) for one in rate.completions or ()],
            }
            for problem, rate in zip(problems, rates, strict=True)
        ]
        del sampler
        _free()
        return found

    def select(self, at: Round) -> dict[str, Any]:
        """`rows.jsonl`: what the round is trained on. ValueError where nothing can be."""
        samples = [self._problem(line) for line in _lines(at.folder / SAMPLES)]
        rows, counts = selected(self.recipe, samples)
        if not rows:
            needed = "right on some" if self.recipe.method in IMITATE else "right and wrong on the same"
            raise ValueError(
                f"round {at.number}: no row for `method: {self.recipe.method}` out of {len(samples)} problems: of {counts['samples']} "
                f"samples {counts['scored']} could be scored and {counts['right']} are right, and the model has to be {needed}. Raise "
                "`n_samples` or `rounds.questions`, or take other `data` (or `reward`, where nothing could be scored), in another "
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
        rows = training_rows(recipe.method, _lines(at.folder / ROWS))
        seed = seed_of(recipe.sampling.seed, at.number, "train")
        arguments = {"seed": seed, "use_cpu": recipe.sampling.use_cpu, **recipe.training}
        counted = _Counted(at.folder / "metrics.jsonl")
        with self._trained(at, tokenizer, rows, [begin, arguments], counted) as (folder, training):
            reference = self._reference(at)
            train_on(recipe.method, model, tokenizer, rows, folder, arguments, training, [counted], reference)
        del model
        _free()
        return {"from": "base" if begin != at.current else "last", **counted.facts()}

    def _reference(self, at: Round) -> Any:
        """DPO's, where it is not the model that the round trains, as it begins."""
        recipe = self.recipe
        if recipe.method != "dpo" or recipe.pairs is None or recipe.pairs.reference != "base":
            return None
        return load_model(ModelSection(path=at.start), recipe.sampling.seed)[0]

    @contextmanager
    def _trained(
        self, at: Round, tokenizer: Any, rows: Any, made_from: Any, counted: _Counted
    ) -> Iterator[tuple[Path, StoppableTraining]]:
        """Where the model of a training goes, and what trains it; a stopped one is gone on with from `stopped/`."""
        with self.stop.training(at.folder / STOPPED, identity_of(rows, made_from)) as training:
            counted.begin(training.step)
            with whole_folder(at.folder / MODEL) as folder:
                yield folder, training
                _finish(folder, tokenizer)
        training.done()

    def evaluate(self, at: Round) -> dict[str, Any]:
        """`evaluation/`: the model that the round leaves on the held-out rows. Without its seconds, which no two runs share."""
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
        replace(result, seconds=None).write(at.folder / "evaluation")
        _free()
        return {
            "accuracy": result.accuracy.to_dict() if result.accuracy else None,
            "sampled_accuracy": result.sampled_accuracy.to_dict() if result.sampled_accuracy else None,
            "mean_length": result.mean_length,
            "mean_length_correct": result.mean_length_correct,
            "worked_out_share": result.worked_out_share,
        }


class _Counted(MetricsFile):
    """`metrics.jsonl` of one training, begun anew or gone on with, and what a round's marker says of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.steps, self.loss = 0, None
        self.weights: list[float] = []

    def begin(self, step: int) -> None:
        """After ``step`` steps: the lines up to there stay."""
        if step:
            cut_metrics(self.path, step)
            self.weights = [line[WEIGHT] for line in _lines(self.path) if WEIGHT in line]
        else:
            self.path.unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        super().on_log(args, state, control, logs, **more)
        self.loss = (logs or {}).get("train_loss", self.loss)
        if WEIGHT in (logs or {}):
            self.weights.append((logs or {})[WEIGHT])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps = state.global_step

    def facts(self) -> dict[str, Any]:
        """Optimizer steps, mean loss; of pairs also w(θ) in the first and the last log."""
        found: dict[str, Any] = {"steps": self.steps, "loss": self.loss}
        return found | ({"weight_first": self.weights[0], "weight_last": self.weights[-1]} if self.weights else {})


def _sample_facts(lines: list[dict[str, Any]], asked: int) -> dict[str, Any]:
    """Tokens: of the texts, and one for each end that was written."""
    each = [(length, score) for line in lines for length, score in zip(line["lengths"], line["scores"], strict=True)]
    cut = sum(line["cut"] or 0 for line in lines)
    scored = [score for _, score in each if score is not None]
    right = [length for length, score in each if score is not None and score >= CORRECT_FROM]
    return {
        "questions": asked,
        "left_out": asked - len(lines),
        "samples": len(each),
        "right_share": len(right) / len(scored) if scored else None,
        "cut": cut,
        "tokens": sum(length for length, _ in each) + len(each) - cut,
        "mean_length": fmean(length for length, _ in each),
        "mean_length_right": fmean(right) if right else None,
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def _finish(folder: Path, tokenizer: Any) -> None:
    """The tokenizer, and without the pickled arguments of the trainer, which name this machine."""
    tokenizer.save_pretrained(folder)
    (folder / "training_args.bin").unlink(missing_ok=True)


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
