"""`grpo-lab rounds`: rejection fine-tuning (RFT, Online RFT, Expert Iteration) and preference training (DPO, SimPO) by
rounds.

The folder: `start/`, `round-1/` … (`rounds.py`), `rounds.jsonl` (one line a round), `report.html`, `run.json`, and when
all rounds are done the last model in the folder itself, `evaluation/before` and `evaluation/after`. The same command
goes on with a run that was killed, and with a finished one when `rounds.count` is larger.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from grpo_lab.evaluation import write_report
from grpo_lab.evaluation.run_page import rounds_table
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import check_place, is_local, write_json_lines
from grpo_lab.pipelines import rounds_plan as words
from grpo_lab.pipelines.in_words import count_of, told
from grpo_lab.pipelines.releases import versions
from grpo_lab.pipelines.round_parts import RoundParts, check_rows
from grpo_lab.pipelines.rounds import Round, round_folder, rounds
from grpo_lab.pipelines.rounds_recipe import IMITATE, RoundsRecipe
from grpo_lab.pipelines.rounds_table import COLUMNS, line_of
from grpo_lab.recipe.checks import check_trackers, cold_start_rows
from grpo_lab.recipe.job import Questions, check_model, questions
from grpo_lab.recipe.models import model_files
from grpo_lab.runs.differences import plain_settings, refuse_other_rows, refuse_other_settings, rows_fingerprint
from grpo_lab.runs.folder import read_marker, record_of, write_run
from grpo_lab.runs.stage import Words, carry_out, plan_of, read_facts, working
from grpo_lab.runs.stop import STOP_SETTINGS
from grpo_lab.stages.train import MODEL
from grpo_lab.trainer.supervised.cold_start import check_cold_start
from grpo_lab.trainer.supervised.preference import check_training

PIPELINE = "rounds"
MAY_CHANGE = ("name", "output_dir", "keep_models", *STOP_SETTINGS)
"""Settings that no finished part depends on; beside them `rounds.count`, which may grow."""

console = Terminal()


@dataclass(frozen=True)
class RoundsDone:
    """The folder with the last model, and one line for the start (round 0) and each round, as in `rounds.jsonl`."""

    folder: Path
    lines: list[dict[str, Any]]


def run_rounds(recipe: RoundsRecipe, overwrite: bool = False) -> RoundsDone:
    """Run ``recipe``, or go on with what an earlier, killed run left in the folder. ``overwrite`` begins anew.

    Raises:
        ValueError: another run or something else in the folder, a setting that does not fit, a round without rows.
        Interrupted: asked to stop; what is done is kept, and the same call goes on.
    """
    asked, cold_rows = resolve(recipe, overwrite)
    new = overwrite or not check_folder(recipe, overwrite)
    with working(recipe, new) as stop:
        work = RoundParts(recipe, asked, cold_rows, stop)
        return _carried_out(recipe, overwrite, work, rows_fingerprint(asked.rows))


def plan_of_rounds(recipe: RoundsRecipe, overwrite: bool = False) -> Words:
    """What `grpo-lab rounds` will do, in words. ValueError for what would stop it."""
    asked, cold_rows = resolve(recipe, overwrite, here_only=True)
    stages, count = RoundParts(recipe, asked, cold_rows).of_round(), recipe.rounds.count
    names, done = ", ".join(stage.name for stage in stages), words.done(recipe)
    return {
        "method": recipe.method,
        "start model": words.start(recipe, cold_rows),
        "rows": count_of(asked.rows, recipe.data),
        "reward": told(recipe.reward),
        "rounds": "once" if count == 1 else f"{count} times: {names}",
        **plan_of(stages),
        "done already": f"{done}{' (--overwrite begins anew)' if overwrite else ''}" if done else "nothing",
        "output folder": str(recipe.output_dir),
    }


def kept(recipe: RoundsRecipe) -> str:
    """What is there after Ctrl-C."""
    done = words.done(recipe)
    return f"{done} in {recipe.output_dir} (the same command goes on)" if done else "no part of a round yet"


def resolve(recipe: RoundsRecipe, overwrite: bool, here_only: bool = False) -> tuple[Questions, Any]:
    """What the recipe names, and the rows of its cold start; nothing is written.

    ValueError for what would stop the run (a dry run asks the same).
    """
    check_settings(recipe)
    found = check_folder(recipe, overwrite)
    asked = questions(recipe.data, recipe.reward, recipe.evaluation, here_only)
    if asked.rows is not None:
        check_rows(recipe, asked.rows)
        refuse_other_rows(recipe.output_dir, found.get("rows"), asked.rows)
    if recipe.base is not None:
        check_place(str(recipe.base.path), "base.path")
    model = check_model(asked, recipe.model, recipe.sampling, recipe.evaluation, here_only)
    started = bool(found) and (round_folder(recipe.output_dir, 0) / "train.json").is_file()
    if recipe.cold_start is None or started:
        return asked, None
    return asked, cold_start_rows(recipe.cold_start, model, here_only)


def _carried_out(recipe: RoundsRecipe, overwrite: bool, work: RoundParts, rows: Any) -> RoundsDone:
    folder = _claim(recipe, overwrite, rows)
    if read_marker(folder / "run.json").get("finished"):
        console.print(f"{folder} is finished: nothing to do. A larger `rounds.count` goes on with it", soft_wrap=True)
        if not (folder / "report.html").is_file():  # killed before it
            write_report(folder)
        return RoundsDone(folder, _lines(folder, recipe.rounds.count))
    first = str(recipe.model.path or "")
    start = Round(folder=round_folder(folder, 0), number=0, current=first, start=first)
    report = _Report(recipe)
    carry_out(work.of_start(), start, work.stop, report)
    lines = _lines(folder, 0)
    for done in rounds(folder, recipe.rounds.count, start, work.of_round(), work.stop, report):
        lines = _lines(folder, done.number)
        write_json_lines(folder / "rounds.jsonl", lines)
        if not recipe.keep_models and done.number > 1:
            shutil.rmtree(round_folder(folder, done.number - 1) / MODEL, ignore_errors=True)
    _deliver(recipe, folder)
    write_run(folder, {**read_marker(folder / "run.json"), "finished": True})
    _show(recipe, lines)
    console.print(f"model: {folder}\nreport: {write_report(folder)}", soft_wrap=True)
    return RoundsDone(folder, lines)


def check_settings(recipe: RoundsRecipe) -> None:
    """ValueError for `training` and `cold_start` that TRL would refuse, and for several processes."""
    settings = check_training("shortest_sft" if recipe.method in IMITATE else recipe.method, recipe.training)
    check_trackers(settings.get("report_to"), "training.report_to")
    if recipe.cold_start is not None:
        check_cold_start(recipe.cold_start.arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`grpo-lab rounds` runs in one process; start it without `accelerate launch` or torchrun")


def check_folder(recipe: RoundsRecipe, overwrite: bool) -> dict[str, Any]:
    """What marks the folder, `{}` for a new one. ValueError for one that holds something else, or rounds of another
    recipe."""
    found = record_of(recipe.output_dir, PIPELINE)
    if overwrite or not found:
        return {}
    refuse_other_settings(recipe.output_dir, found.get("recipe", {}), settings_of(recipe))
    if recipe.rounds.count < found.get("count", 0):
        raise ValueError(
            f"`rounds.count` is {recipe.rounds.count} and `output_dir` {str(recipe.output_dir)!r} has a run of "
            f"{found['count']}; it can only grow"
        )
    return found


def settings_of(recipe: RoundsRecipe) -> dict[str, Any]:
    """What the files of the rounds depend on, as JSON gives it back; a local start model by its content, too."""
    said = {name: value for name, value in plain_settings(recipe).items() if name not in MAY_CHANGE}
    said["rounds"] = {name: value for name, value in said["rounds"].items() if name != "count"}
    local = {str(s.path) for s in (recipe.model, recipe.base) if s is not None and is_local(s.path)}
    return {**said, "model_files": {path: model_files(path) for path in sorted(local)}}


def _claim(recipe: RoundsRecipe, overwrite: bool, rows: Any) -> Path:
    found, folder = check_folder(recipe, overwrite), recipe.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for place in (*folder.glob("round-*"), folder / "start", folder / "evaluation"):
            shutil.rmtree(place, ignore_errors=True)
        (folder / "rounds.jsonl").unlink(missing_ok=True)
    count = recipe.rounds.count
    finished = bool(found.get("finished")) and found.get("count") == count
    about = {
        "name": recipe.name,
        "pipeline": PIPELINE,
        "method": recipe.method,
        "count": count,
        "recipe": settings_of(recipe),
        "rows": rows,
        "versions": versions(),
        "seconds": found.get("seconds", {}),
        "finished": finished,
    }
    write_run(folder, about)
    return folder


class _Report:
    """One rule on the terminal for each stage, and its seconds in `run.json`."""

    def __init__(self, recipe: RoundsRecipe) -> None:
        self.recipe = recipe

    def __call__(self, at: Round, part: str, seconds: float | None) -> None:
        where = f"round {at.number} of {self.recipe.rounds.count}" if at.number else "start"
        if seconds is None:
            console.rule(f"{where}: {part}")
            return
        run = read_marker(self.recipe.output_dir / "run.json")
        run.setdefault("seconds", {})[f"{where.split(' of ')[0]}, {part}"] = round(seconds, 1)
        write_run(self.recipe.output_dir, run)


def _deliver(recipe: RoundsRecipe, folder: Path) -> None:
    """The last model and the two evaluations, where every other command looks for them."""
    last = round_folder(folder, recipe.rounds.count)
    shutil.copytree(last / MODEL, folder, dirs_exist_ok=True)
    for name, at in (("before", round_folder(folder, 0)), ("after", last)):
        if (at / "evaluation").is_dir():
            shutil.copytree(at / "evaluation", folder / "evaluation" / name, dirs_exist_ok=True)


def _lines(folder: Path, count: int) -> list[dict[str, Any]]:
    """Of the start and the rounds up to ``count``, from their markers."""
    lines: list[dict[str, Any]] = []
    for number in range(count + 1):
        facts = {
            part: read_facts(round_folder(folder, number) / f"{part}.json") or {}
            for part in ("sample", "select", "train", "evaluate")
        }
        lines.append(line_of(number, facts, lines))
    return lines


def _show(recipe: RoundsRecipe, lines: list[dict[str, Any]]) -> None:
    table = Table(title=f"{recipe.name}: {recipe.method}", box=box.SIMPLE_HEAD, title_justify="left")
    found = rounds_table(lines, COLUMNS)
    for title in found.head:
        table.add_column(title, justify="right")
    for row in found.rows:
        table.add_row(*map(str, row))
    console.print(table)
