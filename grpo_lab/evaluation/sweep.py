"""Sweep of one evaluation over conditions: templates, thinking or not, thinking budgets, two models on the same rows.

The first condition is the evaluation's own, with its `summary.json` in the folder of the evaluation: first template,
first mode, widest budget. The others are in folders below it, and `sweep.json` lists all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.comparison import Comparison, paired_test, result_rows, tests_table
from grpo_lab.evaluation.page import Section, Table
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.run_record import RunRecord
from grpo_lab.evaluation.statistics import Interval
from grpo_lab.io import write_json
from grpo_lab.reading import checked_object, read_json

SWEEP = "sweep.json"
AGAINST = "against"
"""Folder of the conditions of a second model, below the evaluation's."""


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation in one condition.

    Attributes:
        name: what tells the condition from the others; empty if nothing does.
        place: its folder, relative to the evaluation's.
        result: the result, whose settings hold the condition.
    """

    name: str
    place: str
    result: EvaluationResult

    @property
    def model(self) -> str:
        """Return the model that was evaluated."""
        return str(self.result.settings.get("model"))


def write_sweep(found: Sequence[Measured], folder: Path) -> None:
    """Write the list of the conditions to `sweep.json` in ``folder``. For a single condition there is no list."""
    (folder / SWEEP).unlink(missing_ok=True)
    if len(found) > 1:
        write_json(folder / SWEEP, [{"name": one.name, "place": one.place} for one in found])


def read_sweep(folder: Path) -> list[Measured]:
    """Read the results that `write_sweep` listed; empty if there was one condition. Raises ValueError if a file is
    damaged."""
    file = folder / SWEEP
    rows = []
    if file.is_file():
        rows = read_json(file)
    if not isinstance(rows, list):
        raise ValueError(f"{file} holds no list of conditions")
    for row in rows:
        try:
            place = Path(checked_object(row, {"name": str, "place": str})["place"])
        except ValueError as error:
            raise ValueError(f"{file}, a condition: {error}") from error
        if place.is_absolute() or ".." in place.parts:
            raise ValueError(f"{file}: {str(place)!r} is not below the folder")
    return [Measured(row["name"], row["place"], EvaluationResult.read(folder / row["place"])) for row in rows]


def compared(found: Sequence[Measured]) -> Comparison:
    """Compare the conditions side by side. If there are two models, test the first one against the other in each
    condition."""
    mine = sum(one.model == found[0].model for one in found)
    names = [one.name if mine == len(found) else f"{one.model} {one.name}".strip() for one in found]
    runs = [RunRecord(Path(one.place), after=one.result, name=name) for one, name in zip(found, names, strict=True)]
    tests = [paired_test(new, old) for new, old in zip(runs, runs[mine:], strict=False)]
    return Comparison(runs, [], tests, [f"{one.name}: {one.why_not}" for one in tests if one.why_not])


def sweep_sections(found: Sequence[Measured]) -> list[Section]:
    """Make the sections about the conditions: accuracy over the thinking budget, results, paired tests. Empty without
    conditions."""
    if not found:
        return []
    both = compared(found)
    results = Table(["", *(run.name for run in both.runs)], result_rows(both), stacked=len(found) > 3)
    return [
        Section("Conditions", points=both.notes, figures=budget_figure(found), table=results),
        Section("Against the other model", table=tests_table(both.tests)),
    ]


def budget_figure(found: Sequence[Measured]) -> list[Figure]:
    """Draw accuracy over the thinking budget, a line for each model, template and mode. Results with thinking off are
    left out; one without a budget is drawn at the longest thinking that it has. Empty if no line has two points."""
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
