"""One evaluation under several conditions: templates, thinking or not, thinking budgets, two models on the same rows.

The first condition is the evaluation's own (`summary.json` in its folder): first template, first mode, widest budget.
The others lie in folders below, and `sweep.json` lists all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table as Columns

from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.comparison import PairedTest, paired_test, test_cells
from grpo_lab.evaluation.page import Section, Table
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.run_record import RunRecord
from grpo_lab.evaluation.terminal import NOT_RECORDED, Terminal, comparison_rows
from grpo_lab.io import write_json

SWEEP, AGAINST = "sweep.json", "against"
ON_TERMINAL = ("", "greedy accuracy", "tokens, mean", "thinking, mean")
"""Columns that fit there, with the measures."""


@dataclass(frozen=True)
class Condition:
    """``thinking``: what the chat template is told; None: nothing. ``budget``: tokens of thinking; None: no limit."""

    template: str
    thinking: bool | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Measured:
    """A condition's result; ``name``: what tells it from the others (empty: nothing does), ``place``: its folder."""

    name: str
    place: str
    model: str
    condition: Condition
    result: EvaluationResult


def conditions_of(
    templates: Sequence[str], thinking: Sequence[bool | None], budgets: Sequence[int | None]
) -> dict[str, Condition]:
    """Name → condition, the evaluation's own first. Without thinking a budget limits nothing: asked once."""
    widest = sorted(dict.fromkeys(budgets), key=lambda one: math.inf if one is None else one, reverse=True)
    found = {}
    for template in dict.fromkeys(templates):
        for mode in dict.fromkeys(thinking):
            for budget in [None] if mode is False else widest:
                told = {None: "", True: "thinking", False: "no-thinking"}[mode]
                limit = f"budget-{'none' if budget is None else budget}"
                parts = [
                    template if len(set(templates)) > 1 else "",
                    told if len(set(thinking)) > 1 else "",
                    limit if len(widest) > 1 and mode is not False else "",
                ]
                found["-".join(filter(None, parts))] = Condition(template, mode, budget)
    return found


def write_sweep(found: Sequence[Measured], folder: Path) -> None:
    """The list of results that were written below ``folder``; none of a single one."""
    (folder / SWEEP).unlink(missing_ok=True)
    if len(found) > 1:
        rows = [{"name": one.name, "place": one.place, "model": one.model, **vars(one.condition)} for one in found]
        write_json(folder / SWEEP, rows)


def read_sweep(folder: Path) -> list[Measured]:
    """What `write_sweep` left; empty where there was one condition. ValueError: damaged."""
    if not (folder / SWEEP).is_file():
        return []
    found = []
    for row in json.loads((folder / SWEEP).read_text(encoding="utf-8")):
        place = str(row["place"])
        if place.startswith("/") or ".." in Path(place).parts:
            raise ValueError(f"{folder / SWEEP}: {place!r} is not below the folder")
        condition = Condition(row["template"], row["thinking"], row["budget"])
        result = EvaluationResult.read(folder / place)
        found.append(Measured(row["name"], place, row["model"], condition, result))
    return found


def paired(found: Sequence[Measured]) -> dict[str, PairedTest]:
    """Name of a condition → the first model against the other one in it."""
    first = {one.name: one for one in found if one.model == found[0].model}
    others = {one.name: one for one in found if one.model != found[0].model}
    records = {
        one.place: RunRecord(Path(one.place), after=one.result, name=" ".join(filter(None, (one.model, one.name))))
        for one in found
    }
    both = [name for name in first if name in others]
    return {name: paired_test(records[first[name].place], records[others[name].place]) for name in both}


def sweep_rows(found: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Heading and one row a condition; columns that no condition has a number for are left out."""
    columns = [{what: new for what, _, new, _ in comparison_rows(None, one.result)} for one in found]
    names = list(dict.fromkeys(name for one in columns for name in one if one[name] != NOT_RECORDED))
    several = len({one.model for one in found}) > 1
    titles = [" ".join(filter(None, (one.model if several else "", one.name))) or "as asked" for one in found]
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
    shown = [place for place, name in enumerate(head) if name in ON_TERMINAL or name in found[0].result.measures]
    table = Columns(box=box.SIMPLE_HEAD, padding=0)
    for place in shown:
        table.add_column(head[place], justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    console.print(table)
    for line in test_lines(found):
        console.print(line, soft_wrap=True)


def sweep_sections(found: Sequence[Measured]) -> list[Section]:
    """The conditions on a page: table, paired tests, accuracy over the budget."""
    if not found:
        return []
    head, rows = sweep_rows(found)
    return [Section("Conditions", points=test_lines(found), figures=budget_figures(found), table=Table(head, rows))]


def budget_figures(found: Sequence[Measured]) -> list[Figure]:
    """Accuracy over the budget, a line for each model, template and mode; no limit stands at the longest thinking."""
    lines: dict[str, list[tuple[float, Any]]] = {}
    for one in found:
        longest = max((o.thinking or 0 for o in one.result.greedy), default=0)
        at = longest if one.condition.budget is None else one.condition.budget
        if one.result.accuracy is not None and one.condition.thinking is not False:
            label = f"{one.model} {one.name.rpartition('budget-')[0].strip('-')}".strip()
            lines.setdefault(label, []).append((at, one.result.accuracy))
    drawn = [
        Line(label, [(at, one.value) for at, one in line], [(one.low, one.high) for _, one in line], markers=True)
        for label, unsorted in lines.items()
        if len(line := sorted(unsorted, key=lambda pair: pair[0])) > 1
    ]
    meaning = "Bars: 95% Wilson interval. Without a limit: at the longest thinking."
    unit: Any = {"unit": "share of problems correct", "x_unit": "thinking budget, tokens", "share": True}
    return [one for one in [figure("Accuracy over the thinking budget", meaning, drawn, **unit)] if one]
