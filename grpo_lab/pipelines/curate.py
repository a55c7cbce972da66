"""`grpo-lab curate`: choose training rows by filters over their text, a model's pass rates, and a balance.

The folder has `pass_rates.jsonl` and `guesses.jsonl` (samples, written as they come, by which a killed run continues),
`curated.parquet` and `curated.jsonl` (the rows that stay, every score a column), `all.parquet` (all rows, with `kept`
and `dropped_by`) and `report.html`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from grpo_lab.curation import CurationReport, Selection
from grpo_lab.evaluation import write_report
from grpo_lab.evaluation.outcomes import write_parquet
from grpo_lab.evaluation.terminal import duration
from grpo_lab.io import write_json, write_json_lines
from grpo_lab.pipelines.stage_engine import Stage, Work, carry_out
from grpo_lab.pipelines.staged_command import Resolved, StagedCommand, locked_run, plan_of, resolve
from grpo_lab.recipe.data import load_rows, rows_here
from grpo_lab.recipe.job import Questions, check_model
from grpo_lab.recipe.sections import (
    OF_A_SAMPLED_MODEL,
    STRICT_ACCURACY,
    DataSection,
    ModelSection,
    RewardSection,
    SamplingSettings,
    check_command,
    with_name,
)
from grpo_lab.runs.console import count_of, describe
from grpo_lab.runs.differences import versions
from grpo_lab.runs.stage import Words, console
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import NULL_IS_DEFAULT, Hours, read, settings
from grpo_lab.stages.filter import (
    DOMAIN,
    GUESSES,
    PASS_RATES,
    SCORES,
    Filtering,
    Filters,
    leave_room,
    measure_pass_rates,
    shown_column,
    to_be_measured,
)
from grpo_lab.stages.sample import plan_of_samples, refuse_other_count
from grpo_lab.visible import encodable

if TYPE_CHECKING:
    import pyarrow as pa

MARKER, KEPT = "curation.json", "curated.parquet"
BY_TEXT = ("kind", "duplicates", "contamination")
"""Filters that read the rows' text and need no model."""
_BATCH = 1000
"""Number of rows that are read or written at once."""


@settings(rest="sampling")
class CurationRecipe:
    """A recipe of `grpo-lab curate`; keys that are no fields are `SamplingSettings`'.

    Attributes:
        name: name of the curation, a title.
        output_dir: folder of its files.
        data: the rows to choose from.
        filters: the filters and their settings.
        model: a saved model that is asked about the rows; None: only the filters run that need none.
        reward: the reward that judges the model's answers.
        sampling: how the model is sampled.
        max_hours, stop_file: when to stop, as in a recipe of `grpo-lab train` (docs/resume.md).
    """

    name: str
    output_dir: Path
    data: DataSection
    filters: Annotated[Filters, NULL_IS_DEFAULT] = field(default_factory=Filters)
    model: ModelSection | None = None
    reward: RewardSection = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    max_hours: Hours | None = None
    stop_file: str | None = None

    def __post_init__(self) -> None:
        measure = [name for name in ("band", "guessable", "hardest") if getattr(self.filters, name) is not None]
        if self.model is None and measure:
            raise ValueError(f"`filters.{measure[0]}` needs a `model` to measure with; add one")
        best_of = self.filters.band and self.filters.band.fail_best_of
        n = self.sampling.n_samples
        if best_of and best_of > n:
            raise ValueError(f"`filters.band.fail_best_of` is {best_of} and `n_samples` {n}; it needs as many")
        if self.model is not None and self.model.path is None:
            raise ValueError("`model` of a curation is a saved one: give `path`, a folder or hub name")
        if self.model is not None:
            self.model.refuse("model", **OF_A_SAMPLED_MODEL)


def curation_recipe_from(written: Mapping[str, Any], default_name: str = "curation") -> CurationRecipe:
    """Make a curation's recipe from a plain mapping; ``default_name``: its name if it has none. Raises ValueError for
    an unknown key (with the nearest match) or a missing section."""
    check_command(written, "curate")
    return read(CurationRecipe, with_name(written, default_name))


@dataclass(frozen=True)
class Curated:
    """Result of a curation: its folder, the table of the rows that stay (every score a column), and the report of what
    each filter dropped."""

    folder: Path
    table: pa.Table
    report: CurationReport

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that stay, as mappings."""
        return list(self.table.to_pylist())


def curate(recipe: CurationRecipe, overwrite: bool = False) -> Curated:
    """Run ``recipe``: filter its rows, write those that stay, and a report.

    Samples that an earlier run has left in the folder are used again, unless ``overwrite`` removes them. Raises
    ValueError if the folder is not a curation's, its samples were made with other settings, or a setting does not fit.
    Raises Interrupted if a stop was requested.
    """
    began = time.perf_counter()
    folder = recipe.output_dir
    ready = resolve(CURATE, recipe, overwrite)
    with locked_run(recipe, lambda: CURATE.earlier(recipe, overwrite)) as (stop, earlier):
        if overwrite:
            for name in (PASS_RATES, GUESSES):
                (folder / name).unlink(missing_ok=True)
        if not earlier:
            write_json(folder / MARKER, {"name": recipe.name, "finished": False})
        filtering = _loaded(recipe, ready, stop)
        carry_out(stages_of(recipe), filtering)
        report = filtering.selection.report(filtering.notes)
        kept = write_rows(folder, filtering.selection)
        made = 0
        sampling = {}
        if filtering.generator:
            made = filtering.generator.made
            sampling = {name: value for name, value in asdict(recipe.sampling).items() if value != {}}
        summary = {
            "name": recipe.name,
            "data": describe(recipe.data),
            "reward": describe(recipe.reward),
            "model": recipe.model.path if recipe.model else None,
            "time": duration(time.perf_counter() - began),
            "completions of this session": made,
            "sampling": sampling,
            "filters": {f.name: describe(getattr(recipe.filters, f.name)) for f in fields(recipe.filters)},
            "versions": versions(),
            "finished": True,
            "report": asdict(report),
        }
        write_json(folder / MARKER, summary)
        page = write_report(folder)
        report.print(console)
        console.print(f"kept: {folder / KEPT}\nreport: {page}", soft_wrap=True)
        return Curated(folder, kept, report)


def plan_of_curation(recipe: CurationRecipe, overwrite: bool = False) -> Words:
    """Describe what `grpo-lab curate` will do, for ``--dry-run``. Raises ValueError for what would stop it."""
    return plan_of(CURATE, recipe, overwrite)


def stages_of(recipe: CurationRecipe) -> list[Stage]:
    """List the stages that the recipe asks for: filters over the text; with a model also room for a completion, pass
    rates and guesses; then balance.

    They leave no markers: samples are kept in files of their own, and the filters may be others next time.
    """
    folder = recipe.output_dir
    filters = recipe.filters

    def stage(name: str, run: Callable[[Filtering], None], whole: bool = True) -> Stage:
        return Stage(name, Work(run, whole=whole), folder, remembered=False)

    found = [stage(name, rules.apply) for name, rules in filters.asked(*BY_TEXT)]
    if recipe.model is not None:
        found.append(stage("room", partial(leave_room, model=str(recipe.model.path))))
        found.append(stage("band", partial(measure_pass_rates, filters=filters), whole=False))
        found += [stage(name, rules.apply, whole=False) for name, rules in filters.asked("guessable")]
    return found + [stage(name, rules.apply) for name, rules in filters.asked("balance", "hardest")]


def _loaded(recipe: CurationRecipe, ready: Resolved, stop: StopRequests) -> Filtering:
    """Return the workspace of the stages: the rows, of which all are kept so far, and what the filters need. Columns
    with the scores of an earlier curation are removed."""
    loaded = ready.asked.rows
    notes = []
    if earlier := [name for name in loaded.column_names if name in (*SCORES, "kept", "dropped_by")]:
        loaded = loaded.remove_columns(earlier)
        notes = [f"Columns of an earlier curation were measured anew: {', '.join(earlier)}."]
    rows = [row for batch in loaded.iter(_BATCH) for row in _rows_of(batch)]
    shown = shown_column(loaded)
    return Filtering(
        folder=recipe.output_dir,
        stop=stop,
        rows=rows,
        selection=Selection(rows, shown=shown, title=recipe.name),
        shown=shown,
        sampling=recipe.sampling,
        reward=ready.asked.reward,
        judge=describe(recipe.reward),
        against=ready.more,
        notes=notes,
    )


def _check(recipe: CurationRecipe, overwrite: bool) -> None:
    """Raise ValueError if the folder has samples of an earlier run, and another number per problem than the recipe asks
    for. With ``overwrite`` nothing is checked, since they will be removed."""
    if overwrite:
        return
    instead = "give --overwrite to sample anew, or another `--output_dir`"
    folder = recipe.output_dir
    refuse_other_count(folder / PASS_RATES, recipe.sampling.n_samples, "n_samples", instead)
    if recipe.filters.guessable is not None:
        refuse_other_count(folder / GUESSES, recipe.filters.guessable.tries, "filters.guessable.tries", instead)


def _load(recipe: CurationRecipe, asked: Questions, overwrite: bool, here_only: bool) -> list[Any]:
    """Load the evaluation sets that the filter ``contamination`` compares rows with. Raises ValueError if they cannot
    be loaded, the model cannot be sampled, or rows have no column to be balanced by."""
    filters = recipe.filters
    by = filters.balance and filters.balance.by
    if by and asked.rows is not None:
        made_by = {"kind": filters.kind, "guesses_right": filters.guessable}  # all other scores need the model alone
        made = [*(name for name in SCORES if made_by.get(name, recipe.model) is not None), DOMAIN]
        own = [name for name in asked.rows.column_names if name not in SCORES]  # an earlier curation's are made anew
        if by not in (*own, *made):
            raise ValueError(f"`filters.balance.by` is {by!r}; the columns are {own}, the scores made here {made}")
    load = rows_here if here_only else load_rows
    sections = filters.contamination and filters.contamination.against
    against = [load(one, f"filters.contamination.against.{place}") for place, one in enumerate(sections or ())]
    if recipe.model is not None:
        check_model(asked, recipe.model, recipe.sampling, here_only=here_only)
    return against


def _words(recipe: CurationRecipe, ready: Resolved, overwrite: bool) -> Words:
    """Describe for the dry run which filters run, and what is sampled for them."""
    rows = ready.asked.rows
    filters = recipe.filters
    samples = {}
    if recipe.model is not None and to_be_measured([] if rows is None else rows.column_names, filters):
        file = recipe.output_dir / PASS_RATES
        samples = plan_of_samples(recipe.model.path, recipe.reward, recipe.sampling, rows, file, overwrite)
    by_model = ("band", "guessable", "balance", "hardest")
    return {
        "rows": count_of(rows, recipe.data),
        **{f"filter: {name}": describe(rules) for name, rules in filters.asked(*BY_TEXT)},
        **samples,
        **{f"filter: {name}": describe(rules) for name, rules in filters.asked(*by_model)},
    }


CURATE = StagedCommand("curate", _check, _load, _words, marker=MARKER)


def _rows_of(batch: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch, name → column, as mappings."""
    return (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def write_rows(folder: Path, selection: Selection) -> pa.Table:
    """Write `curated.parquet`, `curated.jsonl` and `all.parquet`, and return the table of the rows that stay.

    Beside the rows themselves only the table is held in memory: it is made one column at a time, and the lines of the
    JSON file are written some at a time.
    """
    import pyarrow as pa

    table = pa.table({name: pa.array(encodable(values)) for name, values in selection.scored_columns()})
    write_parquet(folder / "all.parquet", table)
    kept = table.filter(table["kept"]).drop_columns(["kept", "dropped_by"])
    write_parquet(folder / KEPT, kept)
    write_json_lines(folder / "curated.jsonl", (row for one in kept.to_batches(_BATCH) for row in one.to_pylist()))
    return kept
