"""A comparison on the terminal, and as one HTML page in the look of the run report."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table as Columns

from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.comparison import Compared, Comparison, PairedTest, compare
from grpo_lab.evaluation.page import Page, Section, Table, text_of
from grpo_lab.evaluation.panels import accuracy_line, panels_of
from grpo_lab.evaluation.run_page import CURVES
from grpo_lab.evaluation.run_record import EVALUATION
from grpo_lab.evaluation.terminal import NOT_RECORDED, Terminal, comparison_rows, points

CAVEAT = (
    "The test asks whether the two models differ on problems such as these. It knows nothing of the luck of one training: "
    "another seed of either run moves its accuracy too."
)
_RESULTS = "Brackets: 95% intervals; Wilson for greedy accuracy, clustered by problem for samples. – : not recorded."
_TESTS = "Difference in percentage points with the 95% interval for matched pairs (Agresti and Min); p: McNemar's exact test, two-sided."
MARK = "grpo_lab comparison"
_RUNS = re.compile(rf'<meta name="{MARK}" content="(\[[^"]*)">')


def write_comparison(found: Comparison, path: str | Path) -> Path:
    """Write the page. ValueError where ``path`` is a file that is no comparison, or cannot be written to."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"--output {str(path)!r} is a folder; name the page, such as {str(path / 'comparison.html')!r}"
        )
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise ValueError(f"--output {str(path)!r} exists and is no comparison; choose another file")
    folders = [os.path.relpath(run.record.folder, path.parent) for run in found.runs]
    return comparison_page(found, folders).write(path)


def rewrite_comparison(path: Path) -> Path:
    """The page in ``path`` from what its runs hold now. ValueError where it is no comparison, or a run is no more there."""
    marked = _RUNS.search(path.read_text(encoding="utf-8", errors="replace"))
    if marked is None:
        raise ValueError(f"{str(path)!r} is a file and no comparison of runs; it was left as it is")
    runs = [os.path.normpath(path.parent / folder) for folder in json.loads(html.unescape(marked[1]))]
    return write_comparison(compare(runs), path)


def comparison_page(found: Comparison, folders: Sequence[str] = ()) -> Page:
    """The page; ``folders``: of the runs, as its own folder sees them."""
    names = [run.name for run in found.runs]
    tests = [(f"{test.name} − {test.against}", *(cell for cell in test_cells(test) if cell)) for test in found.tests]
    head = ["greedy answers to the same problems", "difference", "right only here", f"right only in {names[0]}", "p"]
    differing = [(name, *(_said(name, value) for value in values)) for name, values in found.differing]
    settings = Table(["setting", *names], differing, words=range(1, len(names) + 1))
    figures = comparison_figures(found.runs)
    return Page(
        kind="comparison",
        title=" · ".join(names),
        about=[str(run.record.folder) for run in found.runs],
        cards=[],
        notices=found.notes,
        sections=[
            Section("Results", table=Table(["final evaluation", *names], result_rows(found), stacked=len(names) > 3), foot=_RESULTS),
            Section("Paired tests", table=Table(head, tests), foot=f"{_TESTS} {CAVEAT}"),
            Section("Curves", f"One line a run. {CURVES}", figures=figures),
            Section("Set differently", table=settings),
        ],
        missing=[
            *([] if figures else ["Curves (metrics.jsonl)"]), *([] if differing else ["Settings that differ (run.json)"])
        ],
        runs=json.dumps(list(folders)),
    )  # fmt: skip


def print_comparison(found: Comparison, console: Terminal | None = None) -> None:
    """The results, the tests and the notes for a terminal; plain lines are not wrapped."""
    console = console or Terminal()
    table = Columns(box=box.SIMPLE_HEAD, header_style="bold", padding=0, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("before", "after", "tokens", "truncated"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found.runs:
        before, after = (dict(_column(result)) for result in (run.record.before, run.after))
        accuracy, tokens, cut = "greedy accuracy", "tokens, mean", "truncated"
        cells = [before.get(accuracy), after.get(accuracy), after.get(tokens), after.get(cut)]
        table.add_row(run.name, *(cell or NOT_RECORDED for cell in cells))
    console.print(table)
    lines = []
    for test in found.tests:
        change, gained, lost, p = test_cells(test)
        if test.difference is not None:
            lines.append(
                f"{test.name} against {test.against}: {change} points, p {p} "
                f"(n={test.difference.n}: {gained} right only in the first, {lost} only in the second)"
            )
    for line in [*lines, *(f"note: {note}" for note in found.notes), *([CAVEAT] if lines else [])]:
        console.print(line, soft_wrap=True)


def test_cells(test: PairedTest) -> tuple[str, str, str, str]:
    """Difference in points with its interval, right only here, right only there, p."""
    if test.difference is None or test.p_value is None:
        return f"no test: {test.why_not}", "", "", ""
    return (
        points(test.difference),
        str(test.gained),
        str(test.lost),
        "< 0.0001" if test.p_value < 1e-4 else f"{test.p_value:.2g}",
    )


def result_rows(found: Comparison) -> list[list[str]]:
    """Quantity, then one text a run: accuracy before, then everything of the final evaluation, then the last step."""
    before = [dict(_column(run.record.before)).get("greedy accuracy", NOT_RECORDED) for run in found.runs]
    columns = [dict(_column(run.after)) for run in found.runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [["greedy accuracy before", *before]] if any(text != NOT_RECORDED for text in before) else []
    rows += [[name, *(column.get(name, NOT_RECORDED) for column in columns)] for name in names]
    rows.append(["problems", *(f"{run.after.n_problems:,}" if run.after else NOT_RECORDED for run in found.runs)])
    rows.append(["optimizer steps", *(str(run.record.last_step or NOT_RECORDED) for run in found.runs)])
    return rows


def _column(result: Any) -> list[tuple[str, str]]:
    return [] if result is None else [(name, new) for name, _, new, _ in comparison_rows(None, result)]


def comparison_figures(runs: Sequence[Compared]) -> list[Figure]:
    """Curves with one line a run; quantities that no run recorded are left out."""
    found = [("Held-out accuracy", "Bars: 95% Wilson interval over problems.", [_accuracy(run) for run in runs],
              "share of problems correct", {"share": True})]  # fmt: skip
    for panel in panels_of(*(run.record for run in runs)):
        for label, metrics in panel.lines.items():
            title = panel.title if len(panel.lines) == 1 else f"{panel.title}: {label}"
            lines = [Line(run.name, run.record.first_of(*metrics)) for run in runs]
            missing = [line.label for line in lines if not line.points]
            meaning = f"{panel.meaning} Not recorded: {', '.join(missing)}." if missing else panel.meaning
            found.append((title, meaning, lines, panel.unit, panel.shape))
    return [
        one for title, meaning, lines, unit, shape in found if (one := figure(title, meaning, lines, unit, **shape))
    ]


def _accuracy(run: Compared) -> Line:
    """Of a run; a lone evaluation belongs to no step."""
    return accuracy_line(run.record, run.name) if run.record.kind != EVALUATION else Line(run.name, [])


def _said(name: str, value: Any) -> str:
    return NOT_RECORDED if value is None else text_of(name.rpartition(".")[2], value)
