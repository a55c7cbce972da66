"""`grpo-lab curate`: rows → filters that read the text → pass rates of a model → band, guesses, balance → data and
report.

Cheap filters go first, and the model samples only for rows that are left (`curation_filters`). Samples are written as
they come (`pass_rates.jsonl`, `guesses.jsonl`): a killed run goes on where it was, and another band or balance costs no
sampling.

The folder of a curation: `curated.parquet` and `curated.jsonl` (rows that stay, every score a column), `all.parquet`
(all rows, with `kept` and `dropped_by`), `report.html`, `curation.json`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from grpo_lab.curation import CurationReport, Selection
from grpo_lab.evaluation import write_report
from grpo_lab.evaluation.result import write_parquet
from grpo_lab.evaluation.terminal import Terminal, duration
from grpo_lab.io import write_json, write_json_lines
from grpo_lab.pipelines.curation_filters import GUESSES, PASS_RATES, Asked, Curation
from grpo_lab.pipelines.curation_recipe import CurationRecipe
from grpo_lab.pipelines.in_words import count_of, told
from grpo_lab.pipelines.releases import versions
from grpo_lab.runs.folder import record_of
from grpo_lab.runs.stage import At, Words, carry_out, plan_of, working
from grpo_lab.runs.stop import StopRequests
from grpo_lab.stages.sample import refuse_other_count, samples_in_words
from grpo_lab.visible import encodable

MARKER = "curation.json"

console = Terminal()


@dataclass(frozen=True)
class Curated:
    """What a curation left: its folder, the rows that stay (every score a column) and what was dropped."""

    folder: Path
    rows: list[dict[str, Any]]
    report: CurationReport


def curate(recipe: CurationRecipe, overwrite: bool = False) -> Curated:
    """Run ``recipe``; again with the same folder goes on with the samples that are there.

    Raises:
        ValueError: a folder that is not a curation's, samples made with other settings, or a setting that does not fit.
        Interrupted: asked to stop; what was sampled is kept, and the same call goes on.
    """
    began, asked = time.perf_counter(), resolve(recipe, overwrite)
    new = overwrite or not (recipe.output_dir / MARKER).is_file()
    with working(recipe, new) as stop:
        folder = claim(recipe, overwrite)
        run = Curation(recipe, asked, stop)
        carry_out(run.stages(), At(folder), stop)
        report = run.selection.report(run.notes)
        rows = write_rows(folder, run.selection)
        write_json(folder / MARKER, {**summary_of(run, time.perf_counter() - began), "report": asdict(report)})
        page = write_report(folder)
        report.print(console)
        console.print(f"kept: {folder / 'curated.parquet'}\nreport: {page}", soft_wrap=True)
        return Curated(folder, rows, report)


def plan_of_curation(recipe: CurationRecipe, overwrite: bool = False) -> Words:
    """What `grpo-lab curate` will do, in words. ValueError for what would stop it."""
    asked = resolve(recipe, overwrite, here_only=True)
    stages = Curation(recipe, asked, StopRequests(recipe.output_dir), overwrite).stages()
    rows = count_of(asked.questions.rows, recipe.data)
    return {"rows": rows, **plan_of(stages), "output folder": str(recipe.output_dir)}


def kept(recipe: CurationRecipe) -> str:
    """What is there after Ctrl-C."""
    return samples_in_words({"pass rates": recipe.output_dir / PASS_RATES, "guesses": recipe.output_dir / GUESSES})


def resolve(recipe: CurationRecipe, overwrite: bool, here_only: bool = False) -> Asked:
    """What the recipe names; nothing is written. ValueError for what would stop it; a dry run asks it, too."""
    check_folder(recipe)
    if not overwrite:
        check_counts(recipe)
    return Asked.by(recipe, here_only)


def check_folder(recipe: CurationRecipe) -> None:
    """ValueError for one that holds something else."""
    record_of(recipe.output_dir, "curate", MARKER)


def claim(recipe: CurationRecipe, overwrite: bool) -> Path:
    """The output folder, made and marked; `overwrite` forgets an earlier curation's samples."""
    check_folder(recipe)
    folder = recipe.output_dir
    if overwrite:
        for name in (PASS_RATES, GUESSES):
            (folder / name).unlink(missing_ok=True)
    if overwrite or not (folder / MARKER).is_file():
        write_json(folder / MARKER, {"name": recipe.name, "finished": False})
    return folder


def check_counts(recipe: CurationRecipe) -> None:
    """ValueError where samples are there and the recipe asks for another number of them."""
    instead = "give --overwrite to sample anew, or another `--output_dir`"
    refuse_other_count(recipe.output_dir / PASS_RATES, recipe.sampling.n_samples, "n_samples", instead)
    if recipe.filters.guessable is not None:
        tries = recipe.filters.guessable.tries
        refuse_other_count(recipe.output_dir / GUESSES, tries, "filters.guessable.tries", instead)


def write_rows(folder: Path, selection: Selection) -> list[dict[str, Any]]:
    """`curated.*` and `all.parquet`; returns the rows that stay."""
    import pyarrow as pa

    everything = [encodable(row) for row in selection.scored_rows()]
    table = pa.Table.from_pylist(everything)
    write_parquet(folder / "all.parquet", table)
    kept = table.filter(table["kept"]).drop_columns(["kept", "dropped_by"]) if everything else table
    write_parquet(folder / "curated.parquet", kept)
    rows: list[dict[str, Any]] = kept.to_pylist()
    write_json_lines(folder / "curated.jsonl", rows)
    return rows


def summary_of(run: Curation, seconds: float) -> dict[str, Any]:
    """What was done, for `curation.json` and the report."""
    recipe, sampler = run.recipe, run.sampler
    sampling = {name: value for name, value in asdict(recipe.sampling).items() if value != {}}
    return {
        "name": recipe.name,
        "data": told(recipe.data),
        "reward": told(recipe.reward),
        "model": recipe.model.path if recipe.model else None,
        "time": duration(seconds),
        "completions of this session": sampler.made if sampler else 0,
        "sampling": sampling if sampler else {},
        "filters": {f.name: told(getattr(recipe.filters, f.name)) for f in fields(recipe.filters)},
        "versions": versions(),
        "finished": True,
    }
