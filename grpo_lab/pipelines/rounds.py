"""`grpo-lab rounds`: rejection fine-tuning (RFT, Online RFT, Expert Iteration) and preference training (DPO, SimPO) in
rounds.

Every round has the same stages, in a folder of its own. Its answers are sampled from the model that the round before
has left. In the output folder are (a stage with ? is optional):

    start/                       train? → evaluate?                  the model that samples first
    round-1/, round-2/, …        sample → select → train → evaluate?
    rounds.jsonl, report.html    a line for the start and for each round; the page
    the folder itself            when all rounds are done: the last model, evaluation/before, evaluation/after
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_lab.evaluation import write_report
from grpo_lab.evaluation.rounds_sections import COLUMNS, rounds_table
from grpo_lab.evaluation.terminal import print_table
from grpo_lab.io import saving, write_json_lines
from grpo_lab.pipelines.rounds_recipe import RoundsRecipe, questions_of, seed_of, stages_in_words
from grpo_lab.pipelines.stage_engine import Stage, Work, carry_out
from grpo_lab.pipelines.staged_command import CommandRun, Resolved, StagedCommand, plan_of, resolve, running
from grpo_lab.pipelines.standing import left_in
from grpo_lab.recipe.ahead import check_whole_model
from grpo_lab.recipe.checks import check_trackers, cold_start_rows
from grpo_lab.recipe.job import Questions, check_model
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import ModelSection
from grpo_lab.runs.console import count_of, describe, model_of, settings_in_words
from grpo_lab.runs.differences import settings_of
from grpo_lab.runs.folder import kept
from grpo_lab.runs.stage import Facts, Words, Workspace, console
from grpo_lab.stages.held_out import EVALUATION, Measure
from grpo_lab.stages.sample import SAMPLES, sample, sample_facts, samples_in
from grpo_lab.stages.select import GOLD, ROWS, choose
from grpo_lab.stages.supervised import MODEL, ColdStart, Dpo, Simpo, Train
from grpo_lab.trainer.supervised.methods import check_training

Line = dict[str, Any]
"""Results of a round, or of the start, in `rounds.jsonl` (``line_of``)."""
Rounds = Sequence[Sequence[Stage]]
"""The stages of each round. Round 0 is the start."""
SHOWN = ("", "held-out accuracy", "length", "right", "kept", "ways a solved problem", "rows (gold)", "tokens generated")
"""Columns of the page's table that fit on a terminal."""


def run_rounds(recipe: RoundsRecipe, overwrite: bool = False) -> list[Line]:
    """Run ``recipe``, or continue what an earlier, killed run left in the folder; ``overwrite`` begins anew.

    Returns a line for the start (round 0) and for each round, as `rounds.jsonl` has them. Raises ValueError if the
    folder holds another run or something else, a setting does not fit, or a round has nothing to train on. Raises
    Interrupted if a stop was requested.
    """
    ready = resolve(ROUNDS, recipe, overwrite)
    folder = recipe.output_dir
    about = {
        "method": recipe.method,
        "count": recipe.rounds.count,
        "recipe": ROUNDS.settings(recipe),
        "rows": ready.fingerprint,
    }
    forget = None
    if overwrite:
        forget = [*folder.glob("round-*"), folder / "start", folder / EVALUATION, folder / "rounds.jsonl"]
    rounds = stages_of(recipe, ready.asked, ready.more)
    with running(ROUNDS, recipe, [one for stages in rounds for one in stages], about, forget) as run:
        if run.finished:
            console.print(
                f"{folder} is finished: nothing to do. A larger `rounds.count` goes on with it", soft_wrap=True
            )
            if not (folder / "report.html").is_file():  # the run was killed before it was written
                write_report(folder)
            return lines_of({one.name: one.record().results for one in stages} for stages in rounds)
        lines = _one_by_one(recipe, rounds, run)
        _finish(recipe, lines, run)
        return lines


def _one_by_one(recipe: RoundsRecipe, rounds: Rounds, run: CommandRun) -> list[Line]:
    """Do the stages of the start and of each round that are not done, and write `rounds.jsonl` after each round; return
    its lines."""
    folder = run.folder
    facts: list[Mapping[str, Facts]] = []
    lines: list[Line] = []
    for number, stages in enumerate(rounds):
        workspace = Workspace(round_folder(folder, number), run.stop)
        carry_out(stages, workspace, run)
        facts.append(workspace.facts)
        lines = lines_of(facts)
        if number > 0:
            write_json_lines(folder / "rounds.jsonl", lines)
        if number > 1 and not recipe.keep_models:
            shutil.rmtree(round_folder(folder, number - 1) / MODEL, ignore_errors=True)
    return lines


def _finish(recipe: RoundsRecipe, lines: Sequence[Line], run: CommandRun) -> None:
    """Copy the last model and the evaluations of the start and of the last round into the output folder, where every
    other command looks for them; record that the run is finished, and write the page."""
    folder = run.folder
    first = round_folder(folder, 0)
    last = round_folder(folder, recipe.rounds.count)
    with saving(folder):
        shutil.copytree(last / MODEL, folder, dirs_exist_ok=True)
        for name, place in (("before", first), ("after", last)):
            if (place / EVALUATION).is_dir():
                shutil.copytree(place / EVALUATION, folder / EVALUATION / name, dirs_exist_ok=True)
    inside = [f"{place.name}/{what}" for place in folder.glob("round-*") for what in (EVALUATION, MODEL)]
    run.write(left=left_in(folder, ["rounds.jsonl", EVALUATION, f"{first.name}/{EVALUATION}", *inside]), finished=True)
    found = rounds_table(lines, [column for column in COLUMNS if column[0] in SHOWN])
    print_table(console, f"{recipe.name}: {recipe.method}", found.head, found.rows)
    console.print(f"model: {folder}\nreport: {write_report(folder)}", soft_wrap=True)


def plan_of_rounds(recipe: RoundsRecipe, overwrite: bool = False) -> Words:
    """Describe what `grpo-lab rounds` will do, for ``--dry-run``. Raises ValueError for what would stop it."""
    return plan_of(ROUNDS, recipe, overwrite)


def round_folder(folder: Path, number: int) -> Path:
    """Return the folder of a round: ``start`` for 0, else ``round-<number>``."""
    return folder / (f"round-{number}" if number else "start")


def left_by(recipe: RoundsRecipe, number: int) -> str:
    """Return the folder of the model that round ``number`` leaves. For the start (0) it may be the recipe's own saved
    model, which may be a hub name."""
    if number == 0 and recipe.model.path is not None and recipe.cold_start is None:
        return recipe.model.path
    return str(round_folder(recipe.output_dir, number) / MODEL)


def stages_of(recipe: RoundsRecipe, asked: Questions, cold_rows: Any = None) -> Rounds:
    """List the stages of the start (first) and of each round. ``asked``: the questions and their judge; ``cold_rows``:
    rows of the cold start, or None if it is made already or not asked for."""
    rows = [dict(row) for row in asked.rows]
    each = [of_round(recipe, number, rows, asked.reward) for number in range(1, recipe.rounds.count + 1)]
    return [of_start(recipe, cold_rows), *each]


def of_start(recipe: RoundsRecipe, cold_rows: Any = None) -> list[Stage]:
    """List the stages of the start: ``train`` if its model has to be built or needs a cold start (on ``cold_rows``),
    and ``evaluate`` if the recipe asks for it."""
    folder = round_folder(recipe.output_dir, 0)
    sampling = recipe.sampling
    model = left_by(recipe, 0)
    stages = []
    if model == str(folder / MODEL):
        kind = ColdStart(recipe.model, None, sampling.seed)
        if (cold := recipe.cold_start) is not None:
            training = {"use_cpu": sampling.use_cpu, **cold.arguments}
            kind = ColdStart(recipe.model, cold.data, sampling.seed, training, sampling.chat_template_kwargs)
        stages = [Stage("train", Work(partial(kind.run, rows=cold_rows), kind.leaves), folder)]
    if recipe.evaluation is not None and recipe.evaluation.before:
        stages.append(Stage("evaluate", Measure(model, recipe.evaluation, sampling), folder, [Path(model)]))
    return stages


def of_round(recipe: RoundsRecipe, number: int, rows: Sequence[Mapping[str, Any]], reward: Any) -> list[Stage]:
    """List the stages of round ``number``, from 1: sample, select, train and, if there are held-out rows, evaluate.
    ``rows``: all questions; ``reward``: judges the answers."""
    folder = round_folder(recipe.output_dir, number)
    sampling = recipe.sampling
    current = left_by(recipe, number - 1)
    start = left_by(recipe, 0)
    begin = current
    if recipe.rounds.train_from == "base":
        begin = start if recipe.base is None else str(recipe.base.path)

    def ask(workspace: Workspace) -> Facts:
        """Sample n completions of each of the round's questions with the current model, and score them, into
        `samples.jsonl`."""
        questions = questions_of(number, len(rows), recipe.rounds.questions, sampling.seed)
        drawn = replace(sampling, seed=seed_of(sampling.seed, number, "sample"))
        said = {"model": None, "reward": describe(recipe.reward)}  # the model is known by its files
        problems = {row: rows[row] for row in questions}
        lines = sample(workspace, problems, current, drawn, reward, said, f"round {number}: samples")
        return sample_facts(lines, len(questions))

    def select(workspace: Workspace) -> Facts:
        """Choose what the round is trained on, into `rows.jsonl`. Raises ValueError if nothing is left."""
        who = f"round {number}, `method: {recipe.method}`: "
        otherwise = f", in another `output_dir` or with --overwrite; the model so far is {current}"
        return choose(samples_in(folder / SAMPLES, rows), recipe.way, folder, who, otherwise)

    def train(workspace: Workspace) -> Facts:
        """Train on the round's rows with TRL's trainer and a fresh optimizer, into `model/`."""
        seed = seed_of(sampling.seed, number, "train")
        training = {"use_cpu": sampling.use_cpu, **recipe.training}
        reference = None
        if recipe.method == "dpo" and recipe.pairs is not None and recipe.pairs.reference == "base":
            reference = load_model(ModelSection(path=start), sampling.seed)[0]  # the start model in every round
        method = {"dpo": Dpo, "simpo": Simpo}.get(recipe.method, Train)
        kind = method(begin, str(folder / ROWS), seed, training, sampling.chat_template_kwargs)
        return {"from": "base" if begin != current else "last", **kind.run(workspace, reference)}

    model = {"model": MODEL}
    stages = [
        Stage("sample", Work(ask, {"samples": SAMPLES}), folder, [Path(current)]),
        Stage("select", Work(select, {"rows": ROWS}), folder, [folder / SAMPLES]),
        Stage("train", Work(train, model), folder, [folder / ROWS, Path(begin)]),
    ]
    if (held_out := recipe.evaluation) is not None:
        measure = Measure(left_by(recipe, number), held_out, sampling)
        stages.append(Stage("evaluate", measure, folder, [folder / MODEL]))
    return stages


def _check(recipe: RoundsRecipe, overwrite: bool) -> None:
    """Raise ValueError for training settings that are not possible, or if this is one of several processes."""
    settings = check_training(recipe.method, recipe.training)
    check_trackers(settings.get("report_to"), "training.report_to")
    if recipe.cold_start is not None:
        check_training("sft", recipe.cold_start.arguments, "cold_start")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`grpo-lab rounds` runs in one process; start it without `accelerate launch` or torchrun")


def _follow(recipe: RoundsRecipe, earlier: Facts) -> None:
    """Raise ValueError if the recipe has fewer rounds than the run in its folder."""
    if recipe.rounds.count < earlier.get("count", 0):
        raise ValueError(
            f"`rounds.count` is {recipe.rounds.count} and `output_dir` {str(recipe.output_dir)!r} has a run of "
            f"{earlier['count']}; it can only grow"
        )


def _load(recipe: RoundsRecipe, asked: Questions, overwrite: bool, here_only: bool) -> Any:
    """Load the rows of the cold start, if it is asked for and still to be made; else return None. Raises ValueError for
    rows or models that do not fit."""
    number = recipe.rounds.questions
    if asked.rows is not None:
        if recipe.keep is not None and recipe.keep.gold and GOLD not in asked.rows.column_names:
            raise ValueError(f"`keep.gold` needs a column {GOLD!r} in `data`; it has {asked.rows.column_names}")
        if number is not None and number > len(asked.rows):
            raise ValueError(
                f"`rounds.questions` is {number} and `data` has {len(asked.rows)} rows; ask fewer, or leave it out for "
                "all"
            )
    if recipe.base is not None:
        check_whole_model(recipe.base, "base.path")
    if recipe.base is None or recipe.cold_start is not None:  # else the model only samples, and may be an adapter
        check_whole_model(recipe.model)
    model = check_model(asked, recipe.model, recipe.sampling, recipe.evaluation, here_only)
    if recipe.cold_start is None:
        return None
    made = of_start(recipe)[0]
    if not overwrite and not made.due(made.record()):
        return None
    return cold_start_rows(recipe.cold_start, model, here_only)


def _words(recipe: RoundsRecipe, ready: Resolved, overwrite: bool) -> Words:
    """Describe for the dry run how a round goes, and how far an earlier run has come."""
    asked = ready.asked
    count = recipe.rounds.count
    done = kept(recipe)
    start = recipe.model.name
    if recipe.model.path is not None:
        start = model_of(recipe.model.path)
    cold = recipe.cold_start
    if cold is not None:
        rows = count_of(ready.more, cold.data)
        start = f"{start}, after a cold start on {rows}; {settings_in_words(cold.arguments)}"
    plan = stages_in_words(recipe, None if asked.rows is None else len(asked.rows))
    held_out = recipe.evaluation
    if held_out is not None:
        models = "the model of each round"
        if held_out.before:
            models = f"the start model and {models}"
        rows = count_of(asked.held_out, held_out.data)
        plan["4. evaluate"] = f"{models} on {rows}, judged by {describe(held_out.reward)}"
    anew = " (--overwrite begins anew)" if overwrite and done != "nothing" else ""
    return {
        "method": recipe.method,
        "start model": start,
        "rows": count_of(asked.rows, recipe.data),
        "reward": describe(recipe.reward),
        "rounds": "once" if count == 1 else f"{count} times: {', '.join(name[3:] for name in plan)}",
        **plan,
        "done already": f"{done}{anew}",
    }


def _settings(recipe: RoundsRecipe) -> dict[str, Any]:
    """Return the settings that decide what the files of the rounds contain. `rounds.count` is not among them, since it
    may grow."""
    said = settings_of(recipe, recipe.model.path, recipe.base and recipe.base.path)
    said["rounds"].pop("count")
    return said


ROUNDS = StagedCommand("rounds", _check, _load, _words, _settings, rows="rows", follow=_follow)


def lines_of(rounds: Iterable[Mapping[str, Facts]]) -> list[Line]:
    """Make the lines of the start and the rounds from the facts of their stages."""
    lines: list[Line] = []
    for number, facts in enumerate(rounds):
        lines.append(line_of(number, facts, lines))
    return lines


def line_of(number: int, facts: Mapping[str, Mapping[str, Any]], before: Sequence[Line]) -> Line:
    """Return the line of round ``number`` (0: the start); what a round does not have is None.

    ``kept_share``: training rows or pairs that were made of samples, per sample; ``ways``: different right answers per
    solved problem; lengths are in tokens. ``tokens`` generated and optimizer ``steps`` are also summed over the rounds
    so far, without the steps of a cold start.

    Args:
        number: number of the round.
        facts: name of the round's stage → its results.
        before: the lines of the start and the rounds before it.
    """
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
