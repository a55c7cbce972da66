"""One evaluation under several conditions: templates, thinking or not, thinking budgets, two models on the same rows.

The first condition is the evaluation's own (`summary.json` in its folder): first template, first mode, widest budget.
The others lie in folders below, and `sweep.json` lists all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Column
from rich.table import Table as Columns

from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.comparison import PairedTest, paired_test, test_cells
from grpo_lab.evaluation.page import Section, Table
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.run_record import RunRecord
from grpo_lab.evaluation.statistics import Interval
from grpo_lab.evaluation.terminal import NOT_RECORDED, Terminal, comparison_rows
from grpo_lab.io import write_json

SWEEP, AGAINST = "sweep.json", "against"
ON_TERMINAL = ("", "greedy accuracy", "tokens, mean", "thinking, mean")
"""Columns that fit there, with the measures."""


@dataclass(frozen=True)
class Measured:
    """The result in a condition; ``name``: what tells it from the others (empty: nothing does), ``place``: its folder.
    The condition is in the result's settings."""

    name: str
    place: str
    result: EvaluationResult

    @property
    def model(self) -> str:
        return str(self.result.settings.get("model"))


def write_sweep(found: Sequence[Measured], folder: Path) -> None:
    """The list of results that were written below ``folder``; none of a single one."""
    (folder / SWEEP).unlink(missing_ok=True)
    if len(found) > 1:
        write_json(folder / SWEEP, [{"name": one.name, "place": one.place} for one in found])


def read_sweep(folder: Path) -> list[Measured]:
    """What `write_sweep` left; empty where there was one condition. ValueError: damaged."""
    rows = json.loads((folder / SWEEP).read_text(encoding="utf-8")) if (folder / SWEEP).is_file() else []
    for place in (Path(row["place"]) for row in rows):
        if place.is_absolute() or ".." in place.parts:
            raise ValueError(f"{folder / SWEEP}: {str(place)!r} is not below the folder")
    return [Measured(row["name"], row["place"], EvaluationResult.read(folder / row["place"])) for row in rows]


def paired(found: Sequence[Measured]) -> dict[str, PairedTest]:
    """Name of a condition → the first model against the other one in it."""
    mine = [one for one in found if one.model == found[0].model]
    pairs = zip(mine, found[len(mine) :], strict=False)  # without another model there is none
    return {new.name: paired_test(_record(new), _record(old)) for new, old in pairs}


def _record(one: Measured) -> RunRecord:
    return RunRecord(Path(one.place), after=one.result, name=f"{one.model} {one.name}".strip())


def sweep_rows(found: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Heading and one row a condition; columns that no condition has a number for are left out."""
    columns = [{what: new for what, _, new, _ in comparison_rows(None, one.result)} for one in found]
    names = list(dict.fromkeys(name for one in columns for name in one if one[name] != NOT_RECORDED))
    several = len({one.model for one in found}) > 1
    titles = [_record(one).name if several else one.name for one in found]
    return ["", *names], [[title, *(one.get(n, NOT_RECORDED) for n in names)] for title, one in zip(titles, columns)]


def test_lines(found: Sequence[Measured]) -> list[str]:
    """The paired tests, a line each."""
    said = [(test, *test_cells(test)) for test in paired(found).values()]
    return [
        f"{test.name} against {test.against}: {change}" + (f" points, p {p} ({up} gained, {down} lost)" if p else "")
        for test, change, up, down, p in said
    ]


def print_sweep(found: Sequence[Measured]) -> None:
    """A row a condition, then the paired tests."""
    console, (head, rows) = Terminal(), sweep_rows(found)
    shown = [place for place, name in enumerate(head) if name in {*ON_TERMINAL, *found[0].result.numbers["measures"]}]
    table = Columns(*(Column(head[place], overflow="fold") for place in shown), box=box.SIMPLE_HEAD, padding=0)
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    console.print(table)
    for line in test_lines(found):
        console.print(line, soft_wrap=True)


def sweep_sections(found: Sequence[Measured]) -> list[Section]:
    """The conditions on a page: table, paired tests, accuracy over the budget."""
    if not found:
        return []
    drawn = budget_figure(found)
    return [Section("Conditions", points=test_lines(found), figures=drawn, table=Table(*sweep_rows(found)))]


def budget_figure(found: Sequence[Measured]) -> list[Figure]:
    """Accuracy over the budget, a line for each model, template and mode; no limit stands at the longest thinking."""
    lines: dict[str, list[tuple[int, Interval]]] = {}
    for one in found:
        said = one.result.settings
        longest = max((o.thinking or 0 for o in one.result.greedy), default=0)
        if one.result.accuracy is not None and said.get("thinking") != "off":
            label = f"{one.model} {one.name.rpartition('budget-')[0].strip('-')}".strip()
            lines.setdefault(label, []).append((said.get("thinking_budget", longest), one.result.accuracy))
    drawn = [
        Line(label, [(at, one.value) for at, one in line], [(one.low, one.high) for _, one in line], markers=True)
        for label, line in ((label, sorted(line, key=lambda pair: pair[0])) for label, line in lines.items())
        if len(line) > 1
    ]
    meaning = "Bars: 95% Wilson interval. Without a limit: at the longest thinking."
    how: Any = {"unit": "share of problems correct", "x_unit": "thinking budget, tokens", "share": True}
    return [one for one in [figure("Accuracy over the thinking budget", meaning, drawn, **how)] if one]
