"""`grpo-lab rounds`: rejection fine-tuning (RFT, Online RFT, Expert Iteration) and preference training (DPO, SimPO) by rounds.

The folder: `start/`, `round-1/` … (`rounds.py`), `rounds.jsonl` (one line a round), `report.html`, `run.json`, and when all rounds
are done the last model in the folder itself, `evaluation/before` and `evaluation/after`. The same command goes on with a run that
was killed, and with a finished one when `rounds.count` is larger.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from grpo_lab.evaluation import write_report
from grpo_lab.evaluation.files import write_json_lines
from grpo_lab.evaluation.rounds_page import rounds_table
from grpo_lab.evaluation.terminal import Terminal
from grpo_lab.io import check_place, is_local
from grpo_lab.pipelines.one_writer import OneWriter, check_writable, is_empty
from grpo_lab.pipelines.releases import versions
from grpo_lab.pipelines.round_parts import RoundParts
from grpo_lab.pipelines.round_selection import check_rows
from grpo_lab.pipelines.rounds import MODEL, Round, carry_out, read_facts, round_folder, rounds
from grpo_lab.pipelines.rounds_recipe import IMITATE, RoundsRecipe
from grpo_lab.pipelines.rounds_table import COLUMNS, line_of
from grpo_lab.pipelines.run_folder import read_marker, write_run
from grpo_lab.pipelines.same_run import refuse_other_rows, rows_fingerprint
from grpo_lab.pipelines.stop_requests import STOP_SETTINGS, StopRequests
from grpo_lab.recipe.checks import check_trackers, cold_start_rows
from grpo_lab.recipe.job import Questions, check_model, questions
from grpo_lab.recipe.models import model_files
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
    stop = StopRequests(recipe.output_dir, recipe.max_hours, recipe.stop_file)
    work = RoundParts(recipe, asked, cold_rows, stop)
    with OneWriter(recipe.output_dir).take(), stop:
        stop.heed_waiting(new=not check_folder(recipe, overwrite))
        return _carried_out(recipe, overwrite, work, rows_fingerprint(asked.rows))


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
    start = Round(0, round_folder(folder, 0), str(recipe.model.path or ""), str(recipe.model.path or ""))
    carry_out(work.of_start(), start, _Told(recipe), work.around)
    lines = _lines(folder, 0)
    for done in rounds(folder, recipe.rounds.count, start, work.of_round(), _Told(recipe), work.around):
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
    """What marks the folder, `{}` for a new one. ValueError for one that holds something else, or rounds of another recipe."""
    folder, name = recipe.output_dir, f"`output_dir` {str(recipe.output_dir)!r}"
    check_writable(folder)
    found = read_marker(folder / "run.json")
    if found.get("pipeline") != PIPELINE:
        if folder.is_dir() and not is_empty(folder):
            raise ValueError(f"{name} holds something else; choose another `--output_dir`")
        return {}
    if overwrite:
        return {}
    then, now = _by_name(found.get("recipe", {})), _by_name(settings_of(recipe))
    if other := sorted(key for key in {**then, **now} if then.get(key) != now.get(key)):
        said = "; ".join(f"`{key}` was {_short(then.get(key))} and is {_short(now.get(key))}" for key in other)
        raise ValueError(f"{name} holds a run with other settings: {said}. Choose another, or give --overwrite")
    if recipe.rounds.count < found.get("count", 0):
        raise ValueError(
            f"`rounds.count` is {recipe.rounds.count} and {name} has a run of {found['count']}; it can only grow"
        )
    return found


def settings_of(recipe: RoundsRecipe) -> dict[str, Any]:
    """What the files of the rounds depend on, as JSON gives it back; a local start model by its content, too."""
    said = {name: value for name, value in asdict(recipe).items() if name not in MAY_CHANGE}
    said["rounds"] = {name: value for name, value in said["rounds"].items() if name != "count"}
    local = {s.path for s in (recipe.model, recipe.base) if s is not None and is_local(s.path)}
    said["model_files"] = {str(path): model_files(str(path)) for path in sorted(map(str, local))}
    plain: dict[str, Any] = json.loads(json.dumps(said, default=str))
    return plain


def _by_name(settings: dict[str, Any]) -> dict[str, Any]:
    """As a recipe names them: `rounds.questions`, and what stands beside the sections without one (`n_samples`)."""
    named: dict[str, Any] = {}
    for section, value in settings.items():
        fields = value if isinstance(value, dict) else {"": value}
        named |= {
            name if section == "sampling" else f"{section}.{name}".rstrip("."): one for name, one in fields.items()
        }
    return named


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


class _Told:
    """One rule on the terminal for each part, and its seconds in `run.json`."""

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


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
