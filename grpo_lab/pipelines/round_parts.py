"""The parts of a round (`rounds.py`): sample, select, train, evaluate; and of the start, train and evaluate."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.curation import Sampled, pass_rates
from grpo_lab.evaluation.files import write_json_lines
from grpo_lab.io import whole_folder
from grpo_lab.pipelines.held_out import evaluate_saved_model
from grpo_lab.pipelines.in_words import told
from grpo_lab.pipelines.resume import cut_metrics
from grpo_lab.pipelines.round_selection import questions_of, selected
from grpo_lab.pipelines.rounds import MODEL, Make, Round
from grpo_lab.pipelines.rounds_recipe import IMITATE, RoundsRecipe, seed_of
from grpo_lab.pipelines.run_folder import MetricsFile
from grpo_lab.pipelines.sample_counts import trim_to_whole_batches
from grpo_lab.pipelines.sampler import ModelSampler, with_room
from grpo_lab.pipelines.stop_requests import StopRequests, identity_of
from grpo_lab.recipe.job import Questions
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import ModelSection
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
        self.reward, self.cold_rows = asked.reward, cold_rows
        self.rows = [dict(row) for row in asked.rows]

    def around(self, part: str) -> AbstractContextManager[None]:
        """A stop breaks no part off but the evaluation, which is made as a whole."""
        return nullcontext() if part == "evaluate" else self.stop.held()

    def of_start(self) -> dict[str, Make]:
        """The start model is made where the recipe makes one, and measured where it has held-out rows."""
        recipe = self.recipe
        made: dict[str, Make] = {"train": self.begin} if recipe.model.path is None or recipe.cold_start else {}
        measured = recipe.evaluation is not None and recipe.evaluation.before
        return made | ({"evaluate": self.evaluate} if measured else {})

    def of_round(self) -> dict[str, Make]:
        named: dict[str, Make] = {"sample": self.sample, "select": self.select, "train": self.train}
        return named | ({} if self.recipe.evaluation is None else {"evaluate": self.evaluate})

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
        rates = pass_rates(
            problems,
            self.stop.before_each(sampler.written),
            self.reward,
            settings.n_samples,
            path=progress,
            settings={**sampler.identity(), "model": None, "reward": told(self.recipe.reward)},  # its files say which
            batch_size=settings.problems_per_save,
            label=f"round {at.number}: samples",
            rendered=sampler.rendered,
        )
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
        from datasets import Dataset

        recipe = self.recipe
        base = recipe.base.path if recipe.base is not None else at.start
        begin = at.current if recipe.rounds.train_from == "last" else str(base)
        model, tokenizer = load_model(ModelSection(path=begin), recipe.sampling.seed)
        columns = ("prompt", "completion") if recipe.method in IMITATE else ("prompt", "chosen", "rejected")
        rows = [{name: row[name] for name in columns} for row in _lines(at.folder / ROWS)]
        data = Dataset.from_list(rows)
        seed = seed_of(recipe.sampling.seed, at.number, "train")
        arguments = {"seed": seed, "use_cpu": recipe.sampling.use_cpu, **recipe.training}
        counted = _Counted(at.folder / "metrics.jsonl")
        with self._trained(at, tokenizer, rows, [begin, arguments], counted) as (folder, training):
            if recipe.method in IMITATE:
                from grpo_lab.trainer.supervised.cold_start import supervised

                supervised(model, tokenizer, data, folder, arguments, [counted], train=training)
            else:
                self._prefer(at, model, tokenizer, data, folder, arguments, counted, training)
        del model
        _free()
        return {"from": "base" if begin != at.current else "last", **counted.facts()}

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

    def _prefer(
        self, at: Round, model: Any, tokenizer: Any, data: Any, folder: Path, arguments: Any, counted: Any, train: Any
    ) -> None:
        from grpo_lab.trainer.supervised.preference import prefer

        method: Any = self.recipe.method
        reference = None
        if method == "dpo" and self.recipe.pairs is not None and self.recipe.pairs.reference == "base":
            reference, _ = load_model(ModelSection(path=at.start), self.recipe.sampling.seed)
        prefer(method, model, tokenizer, data, folder, arguments, [counted], reference, train)

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
