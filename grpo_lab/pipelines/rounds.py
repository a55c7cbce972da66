"""`grpo-lab rounds`: rejection fine-tuning (RFT, Online RFT, Expert Iteration) and preference training (DPO, SimPO) by
rounds of one list of stages, each in a folder of its own; the next begins with the model that the one before left.

    start/                       train? → evaluate?                  the model that samples first
    round-1/, round-2/, …        sample → select → train → evaluate
    rounds.jsonl, report.html    one line a round; the page
    the folder itself            when all rounds are done: the last model, evaluation/before, evaluation/after
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_lab.evaluation import write_report
from grpo_lab.evaluation.run_page import COLUMNS, rounds_table
from grpo_lab.evaluation.run_record import gone_from, in_few_words
from grpo_lab.evaluation.terminal import print_table
from grpo_lab.io import saving, write_json_lines
from grpo_lab.pipelines.rounds_recipe import RoundsRecipe, questions_of, seed_of, stages_in_words
from grpo_lab.pipelines.standing import again_in_words, left_in
from grpo_lab.recipe.ahead import check_whole_model
from grpo_lab.recipe.checks import check_trackers, cold_start_rows
from grpo_lab.recipe.job import Questions, check_model, questions
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import ModelSection
from grpo_lab.runs import differences
from grpo_lab.runs.console import count_of, describe, model_of, settings_in_words
from grpo_lab.runs.differences import earlier_run, refuse_other_rows, rows_fingerprint
from grpo_lab.runs.folder import kept
from grpo_lab.runs.stage import (
    Facts,
    Report,
    Stage,
    StagedRun,
    Words,
    Workspace,
    carry_out,
    console,
    no_report,
    read_facts,
    staged_run,
)  # fmt: skip
from grpo_lab.stages.held_out import EVALUATION, Evaluate
from grpo_lab.stages.sample import SAMPLES, sample, sample_facts, samples_in
from grpo_lab.stages.select import GOLD, ROWS, choose
from grpo_lab.stages.supervised import MODEL, ColdStart, Dpo, Simpo, Train
from grpo_lab.trainer.supervised.methods import check_training

ROUNDS = "rounds"
Line = dict[str, Any]
SHOWN = ("", "held-out accuracy", "length", "right", "kept", "ways a solved problem", "rows (gold)", "tokens generated")
"""Columns of the page's table that fit on a terminal."""


def run_rounds(recipe: RoundsRecipe, overwrite: bool = False) -> list[Line]:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder: one line for the start (round 0)
    and each round, as in `rounds.jsonl`. ``overwrite`` begins anew. ValueError: another run or something else there, a
    setting that does not fit, a round without rows; Interrupted: asked to stop."""
    asked, cold_rows = resolve(recipe, overwrite)
    folder = recipe.output_dir
    count = recipe.rounds.count
    about = {"pipeline": ROUNDS, "method": recipe.method, "count": count, "recipe": settings_of(recipe)}
    about["rows"] = rows_fingerprint(asked.rows)
    forget = [*folder.glob("round-*"), folder / "start", folder / EVALUATION, folder / "rounds.jsonl"]

    def earlier() -> dict[str, Any]:
        found = check_folder(recipe, overwrite)
        whole = not make_again(folder, gone_from(folder, found)) and found.get("count") == count
        if found:
            return {**found, "finished": found.get("finished") and whole}
        return {}

    with staged_run(recipe, earlier, about, forget if overwrite else ()) as run:
        if run.about["finished"]:
            console.print(
                f"{folder} is finished: nothing to do. A larger `rounds.count` goes on with it", soft_wrap=True
            )
            if not (folder / "report.html").is_file():  # killed before it
                write_report(folder)
            return _lines(folder, count)
        return _carried_out(recipe, RoundStages(recipe, asked, cold_rows), run)


def _carried_out(recipe: RoundsRecipe, work: RoundStages, run: StagedRun) -> list[Line]:
    folder = run.folder
    first = str(recipe.model.path or "")
    start = Round(folder=round_folder(folder, 0), stop=run.stop, number=0, current=first, start=first)
    carry_out(work.of_start(), start, run.report)
    lines = _lines(folder, 0)
    for done in rounds(folder, recipe.rounds.count, start, work.of_round(), run.report):
        lines = _lines(folder, done.number)
        write_json_lines(folder / "rounds.jsonl", lines)
        if not recipe.keep_models and done.number > 1:
            shutil.rmtree(round_folder(folder, done.number - 1) / MODEL, ignore_errors=True)
    last = round_folder(folder, recipe.rounds.count)
    with saving(folder):
        shutil.copytree(last / MODEL, folder, dirs_exist_ok=True)  # where every other command looks for them
        for name, at in (("before", start.folder), ("after", last)):
            if (at / EVALUATION).is_dir():
                shutil.copytree(at / EVALUATION, folder / EVALUATION / name, dirs_exist_ok=True)
    inside = [f"{place.name}/{what}" for place in folder.glob("round-*") for what in (EVALUATION, MODEL)]
    left = left_in(folder, ["rounds.jsonl", EVALUATION, f"{start.folder.name}/{EVALUATION}", *inside])
    run.write(left=left, finished=True)
    found = rounds_table(lines, [column for column in COLUMNS if column[0] in SHOWN])
    print_table(console, f"{recipe.name}: {recipe.method}", found.head, found.rows)
    console.print(f"model: {folder}\nreport: {write_report(folder)}", soft_wrap=True)
    return lines


def make_again(folder: Path, gone: Sequence[str]) -> bool:
    """Return whether something is ``gone`` from the ``folder`` of finished rounds: the stage of a round that made it
    has no marker any more. ValueError: the model that it was made of is not there either."""
    made = dict.fromkeys(tuple(one.split("/")[:2]) for one in gone if one.startswith(("start/", "round-")))
    for place, what in made:
        number = int(place.removeprefix("round-").replace("start", "0"))
        of = round_folder(folder, number if what == EVALUATION else number - 1)
        is_kept = (of / MODEL).is_dir() or (of.name, MODEL) in made
        if not is_kept and (of / "train.json").is_file():
            raise ValueError(
                f"{place}/{what} is gone from the finished rounds in `output_dir` {str(folder)!r}, and so is "
                f"{of.name}/{MODEL}, of which it was made (`keep_models`); put a copy back, choose another "
                "`--output_dir`, or give --overwrite"
            )
    for place, what in made:
        shutil.rmtree(folder / place / what, ignore_errors=True)
        marker = "evaluate.json" if what == EVALUATION else "train.json"
        (folder / place / marker).unlink(missing_ok=True)
    if gone:
        console.print(f"{folder}: {in_few_words(gone)} gone, and made again", soft_wrap=True)
    return bool(gone)


def plan_of_rounds(recipe: RoundsRecipe, overwrite: bool = False) -> Words:
    """Say what `grpo-lab rounds` will do. ValueError for what would stop it."""
    asked, cold_rows = resolve(recipe, overwrite, here_only=True)
    count = recipe.rounds.count
    done = kept(recipe)
    start = recipe.model.name
    if recipe.model.path is not None:
        start = model_of(recipe.model.path)
    if (section := recipe.cold_start) is not None:
        rows = count_of(cold_rows, section.data)
        start = f"{start}, after a cold start on {rows}; {settings_in_words(section.arguments)}"
    plan = stages_in_words(recipe, None if asked.rows is None else len(asked.rows))
    if (held_out := recipe.evaluation) is not None:
        if held_out.before:
            when = "the start model and the model of each round"
        else:
            when = "the model of each round"
        rows = count_of(asked.held_out, held_out.data)
        plan["4. evaluate"] = f"{when} on {rows}, judged by {describe(held_out.reward)}"
    return {
        "method": recipe.method,
        "start model": start,
        "rows": count_of(asked.rows, recipe.data),
        "reward": describe(recipe.reward),
        "rounds": "once" if count == 1 else f"{count} times: {', '.join(name[3:] for name in plan)}",
        **plan,
        "done already": f"{done}{' (--overwrite begins anew)' if overwrite and done != 'nothing' else ''}",
        **again_in_words(recipe.output_dir, overwrite),
        "output folder": str(recipe.output_dir),
    }


def resolve(recipe: RoundsRecipe, overwrite: bool, here_only: bool = False) -> tuple[Questions, Any]:
    """Load what the recipe names, and the rows of its cold start; nothing is written. ValueError for what would stop
    the run."""
    settings = check_training(recipe.method, recipe.training)
    check_trackers(settings.get("report_to"), "training.report_to")
    if recipe.cold_start is not None:
        check_training("sft", recipe.cold_start.arguments, "cold_start")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`grpo-lab rounds` runs in one process; start it without `accelerate launch` or torchrun")
    found = check_folder(recipe, overwrite)
    asked = questions(recipe.data, recipe.reward, recipe.evaluation, here_only)
    number = recipe.rounds.questions
    if asked.rows is not None:
        if recipe.keep is not None and recipe.keep.gold and GOLD not in asked.rows.column_names:
            raise ValueError(f"`keep.gold` needs a column {GOLD!r} in `data`; it has {asked.rows.column_names}")
        if number is not None and number > len(asked.rows):
            raise ValueError(
                f"`rounds.questions` is {number} and `data` has {len(asked.rows)} rows; ask fewer, or leave it out for "
                "all"
            )
        refuse_other_rows(recipe.output_dir, found.get("rows"), rows_fingerprint(asked.rows))
    if recipe.base is not None:
        check_whole_model(recipe.base, "base.path")
    if recipe.base is None or recipe.cold_start is not None:  # else it only samples
        check_whole_model(recipe.model)
    model = check_model(asked, recipe.model, recipe.sampling, recipe.evaluation, here_only)
    started = bool(found) and (round_folder(recipe.output_dir, 0) / "train.json").is_file()
    if recipe.cold_start is None or started:
        return asked, None
    return asked, cold_start_rows(recipe.cold_start, model, here_only)


def check_folder(recipe: RoundsRecipe, overwrite: bool) -> dict[str, Any]:
    """Read what marks the folder, `{}` for a new one. ValueError: it holds something else, another recipe's rounds, or
    more of them."""
    found = earlier_run(recipe, ROUNDS, overwrite, settings_of)
    if recipe.rounds.count < found.get("count", 0):
        raise ValueError(
            f"`rounds.count` is {recipe.rounds.count} and `output_dir` {str(recipe.output_dir)!r} has a run of "
            f"{found['count']}; it can only grow"
        )
    return found


def settings_of(recipe: RoundsRecipe) -> dict[str, Any]:
    """Settings that the files of the rounds depend on; `rounds.count` may grow."""
    said = differences.settings_of(recipe, recipe.model.path, recipe.base and recipe.base.path)
    said["rounds"].pop("count")
    return said


@dataclass(kw_only=True)
class Round(Workspace):
    """The workspace of a round: its number (0: the start), the model that samples (``current``: of the round before, or
    the start's), and the one that sampled first (``start``); folders or hub names."""

    number: int
    current: str
    start: str

    @property
    def model(self) -> str:
        """The model that the round leaves: its own, where a stage made one, else the one it began with."""
        if "train" in self.facts:
            return str(self.folder / MODEL)
        return self.current


def rounds(
    folder: Path, count: int, start: Round, stages: Sequence[Stage], report: Report = no_report
) -> Iterator[Round]:
    """Rounds 1 … ``count`` after ``start``, each when it is done."""
    current = start.model
    for number in range(1, count + 1):
        place = round_folder(folder, number)
        done = Round(folder=place, stop=start.stop, number=number, current=current, start=start.model)
        carry_out(stages, done, report)
        current = done.model
        yield done


def round_folder(folder: Path, number: int) -> Path:
    """``start`` for 0, else ``round-<number>``."""
    return folder / (f"round-{number}" if number else "start")


class RoundStages:
    """Stages of the rounds of one recipe, with its rows and its reward."""

    def __init__(self, recipe: RoundsRecipe, asked: Questions, cold_rows: Any = None) -> None:
        self.recipe = recipe
        self.asked = asked
        self.cold_rows = cold_rows

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.asked.rows]

    def of_start(self) -> list[Stage]:
        """The start model is made where the recipe makes one, and measured where it has held-out rows."""
        recipe = self.recipe
        made = []
        if recipe.model.path is None or recipe.cold_start:
            made = [Stage("train", self.begin)]
        measured = recipe.evaluation is not None and recipe.evaluation.before
        return made + ([Stage("evaluate", self.evaluate, whole=True)] if measured else [])

    def of_round(self) -> list[Stage]:
        stages = [
            Stage("sample", self.sample),
            Stage("select", self.select, inputs=("sample",)),
            Stage("train", self.train, inputs=("select",)),
        ]
        if self.recipe.evaluation is None:
            return stages
        return [*stages, Stage("evaluate", self.evaluate, whole=True)]

    def begin(self, round_: Round) -> Facts:
        """The start model: built from config, or loaded, and given its cold start."""
        recipe = self.recipe
        cold = self.recipe.cold_start
        if cold is None:
            return ColdStart(recipe.model, None, recipe.sampling.seed).run(round_)
        training = {"use_cpu": recipe.sampling.use_cpu, **cold.arguments}
        template = recipe.sampling.chat_template_kwargs
        return ColdStart(recipe.model, cold.data, recipe.sampling.seed, training, template).run(round_, self.cold_rows)

    def sample(self, round_: Round) -> Facts:
        """`samples.jsonl`: n completions of each of the round's questions by the current model, scored."""
        sampling = self.recipe.sampling
        asked = questions_of(round_.number, len(self.rows), self.recipe.rounds.questions, sampling.seed)
        drawn = replace(sampling, seed=seed_of(sampling.seed, round_.number, "sample"))
        said = {"model": None, "reward": describe(self.recipe.reward)}  # which model, its files say
        label = f"round {round_.number}: samples"
        problems = {row: self.rows[row] for row in asked}
        return sample_facts(sample(round_, problems, round_.current, drawn, self.asked.reward, said, label), len(asked))

    def select(self, round_: Round) -> Facts:
        """`rows.jsonl`: what the round is trained on. ValueError where nothing can be."""
        who = f"round {round_.number}, `method: {self.recipe.method}`: "
        otherwise = f", in another `output_dir` or with --overwrite; the model so far is {round_.current}"
        return choose(samples_in(round_.folder / SAMPLES, self.rows), self.recipe.way, round_.folder, who, otherwise)

    def train(self, round_: Round) -> Facts:
        """`model/`: TRL's trainer on the round's rows, from the last model or from the base; a fresh optimizer."""
        recipe = self.recipe
        seed = seed_of(self.recipe.sampling.seed, round_.number, "train")
        if recipe.base is None:
            base = round_.start
        else:
            base = str(recipe.base.path)
        begin = round_.current if recipe.rounds.train_from == "last" else base
        kind = {"dpo": Dpo, "simpo": Simpo}.get(recipe.method, Train)
        training = {"use_cpu": recipe.sampling.use_cpu, **recipe.training}
        reference = None
        pairs = recipe.pairs
        if recipe.method == "dpo" and pairs is not None and pairs.reference == "base":  # the start model in every round
            reference = load_model(ModelSection(path=round_.start), recipe.sampling.seed)[0]
        template = recipe.sampling.chat_template_kwargs
        facts = kind(begin, str(round_.folder / ROWS), seed, training, template).run(round_, reference)
        return {"from": "base" if begin != round_.current else "last", **facts}

    def evaluate(self, round_: Round) -> Facts:
        """`evaluation/`: the model that the round leaves on the held-out rows."""
        assert self.recipe.evaluation is not None
        sampling = self.recipe.sampling
        section = self.recipe.evaluation.rendered_as(sampling.chat_template_kwargs)
        kind = Evaluate(round_.model, section, sampling.seed, sampling.use_cpu, sampling.max_completion_length)
        return kind.measured(round_.folder / EVALUATION)


def _lines(folder: Path, count: int) -> list[Line]:
    """Make the lines of the start and the rounds up to ``count`` from their markers."""
    lines: list[Line] = []
    for number in range(count + 1):
        place = round_folder(folder, number)
        parts = ("sample", "select", "train", "evaluate")
        lines.append(line_of(number, {part: read_facts(place / f"{part}.json") or {} for part in parts}, lines))
    return lines


def line_of(number: int, facts: Mapping[str, Mapping[str, Any]], before: Sequence[Line]) -> Line:
    """The line of round ``number`` (0: the start). ``kept_share`` = own rows or pairs / samples; ``ways`` = right
    answers that differ, a problem solved; ``tokens`` generated and optimizer ``steps`` also as totals over the rounds
    so far (a cold start's steps are not among them)."""
    sample, select, train, found = (facts.get(name, {}) for name in ("sample", "select", "train", "evaluate"))
    accuracy = found.get("accuracy") or {}
    total = before[-1] if before else {}
    steps = train.get("steps", 0) if number else 0

    def ratio(part: float | None, whole: float | None) -> float | None:
        if part is None or not whole:
            return None
        return part / whole

    line = {
        "round": number,
        "questions": sample.get("questions"),
        "samples": sample.get("samples"),
        "right_share": sample.get("right_share"),
        "solved": select.get("solved"),
        "ways": ratio(select.get("ways"), select.get("solved")),
        "kept_share": ratio(select.get("kept", 0) - select.get("gold", 0), sample.get("samples")),
        "rows": select.get("rows"),
        "gold": select.get("gold"),
        "tokens": sample.get("tokens", 0),
        "tokens_total": total.get("tokens_total", 0) + sample.get("tokens", 0),
        "sample_length": sample.get("mean_length"),
        "steps": steps,
        "steps_total": total.get("steps_total", 0) + steps,
        "loss": train.get("loss") if number else None,
        "accuracy": accuracy.get("value"),
        "accuracy_low": accuracy.get("low"),
        "accuracy_high": accuracy.get("high"),
        "length": found.get("mean_length"),
        "length_right": found.get("mean_length_correct"),
    }
    return line | {name: train[name] for name in ("weight_first", "weight_last") if name in train}
