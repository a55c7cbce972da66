"""A comparison on the terminal, and as one HTML page in the look of the run report. Every text is escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.evaluation.charts import Line, draw
from grpo_lab.evaluation.comparison import Compared, Comparison, PairedTest
from grpo_lab.evaluation.files import encodable, write_text
from grpo_lab.evaluation.page import page
from grpo_lab.evaluation.panels import PANELS, PanelView, accuracy_line
from grpo_lab.evaluation.report import text_of
from grpo_lab.evaluation.samples import visible
from grpo_lab.evaluation.terminal import NOT_RECORDED, comparison_rows

if TYPE_CHECKING:
    from rich.console import Console

MARK = "grpo_lab comparison"
CAVEAT = (
    "The test asks whether the two models differ on problems such as these. It knows nothing of the luck of one training: "
    "another seed of either run moves its accuracy too."
)


def write_comparison(found: Comparison, path: str | Path) -> Path:
    """Write the page. ValueError where ``path`` is a file that is no comparison, or cannot be written to."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"--output {str(path)!r} is a folder; name the page, such as {str(path / 'comparison.html')!r}"
        )
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise ValueError(f"--output {str(path)!r} exists and is no comparison; choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, encodable(comparison_page(found)))
    except OSError as error:
        raise ValueError(f"--output {str(path)!r} cannot be written ({error.strerror}); choose another file") from error
    return path


def comparison_page(found: Comparison) -> str:
    """The page as text."""
    return page(
        "comparison.html.j2",
        mark=MARK,
        names=[visible(run.name) for run in found.runs],
        folders=[visible(str(run.record.folder)) for run in found.runs],
        notes=[visible(note) for note in found.notes],
        results=result_rows(found),
        tests=[(visible(test.name), visible(test.against), *test_cells(test)) for test in found.tests],
        differing=[(visible(name), [_said(value) for value in values]) for name, values in found.differing],
        panels=panel_views(found.runs),
        caveat=CAVEAT,
    )


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """The results, the tests and the notes for a terminal; plain lines are neither wrapped nor coloured."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=0, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("before", "after", "tokens", "truncated"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found.runs:
        before, after = (dict(_column(result)) for result in (run.record.before, run.after))
        accuracy, tokens, cut = "greedy accuracy", "tokens, mean", "truncated"
        cells = [before.get(accuracy), after.get(accuracy), after.get(tokens), after.get(cut)]
        table.add_row(Text(visible(run.name)), *(cell or NOT_RECORDED for cell in cells))
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
        console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def test_cells(test: PairedTest) -> tuple[str, str, str, str]:
    """Difference in points with its interval, right only here, right only there, p."""
    if test.difference is None or test.p_value is None:
        return (test.why_not, NOT_RECORDED, NOT_RECORDED, NOT_RECORDED)
    d = test.difference
    change = f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"
    return change, str(test.gained), str(test.lost), "< 0.0001" if test.p_value < 1e-4 else f"{test.p_value:.2g}"


def result_rows(found: Comparison) -> list[tuple[str, list[str]]]:
    """(quantity, one text a run): accuracy before, then everything of the final evaluation, then the last step."""
    before = [dict(_column(run.record.before)).get("greedy accuracy", NOT_RECORDED) for run in found.runs]
    columns = [dict(_column(run.after)) for run in found.runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [("greedy accuracy before", before)] if any(text != NOT_RECORDED for text in before) else []
    rows += [(name, [column.get(name, NOT_RECORDED) for column in columns]) for name in names]
    rows.append(("problems", [str(run.after.n_problems) if run.after else NOT_RECORDED for run in found.runs]))
    rows.append(("optimizer steps", [str(run.record.last_step or NOT_RECORDED) for run in found.runs]))
    return rows


def _column(result: Any) -> list[tuple[str, str]]:
    return [] if result is None else [(name, new) for name, _, new, _ in comparison_rows(None, result)]


def panel_views(runs: tuple[Compared, ...]) -> list[PanelView]:
    """Curves with one line a run; quantities that no run recorded are left out."""
    views = [_view("Held-out accuracy", "Bars: 95% Wilson interval over problems.", "share of problems correct",
                   [_accuracy(run) for run in runs], share=True)]  # fmt: skip
    components = sorted(
        {name for run in runs for name in run.record.metrics if re.fullmatch(r"rewards/.+/mean", name, re.DOTALL)}
    )
    for name in ["reward", *(components if len(components) > 1 else [])]:
        title = "Reward" if name == "reward" else f"Reward: {name[len('rewards/') : -len('/mean')]}"
        lines = [Line(run.name, run.record.first_of(name)) for run in runs]
        views.append(_view(title, "Mean over the completions of a step.", "reward", lines, from_zero=True))
    for panel in PANELS:
        for label, metrics in panel.lines:
            title = panel.title if len(panel.lines) == 1 else f"{panel.title}: {label}"
            lines = [Line(run.name, run.record.first_of(*metrics)) for run in runs]
            shape = {"share": panel.share, "from_zero": panel.from_zero, "rule": panel.rule}
            views.append(_view(title, panel.meaning, panel.unit, lines, **shape))
    return [view for view in views if view is not None]


def _accuracy(run: Compared) -> Line:
    """Of a run; a lone evaluation belongs to no step."""
    record = run.record
    return accuracy_line(record, run.name) if record.metrics or record.before or record.during else Line(run.name, [])


def _view(title: str, meaning: str, unit: str, lines: list[Line], **shape: Any) -> Any:
    if not any(line.points for line in lines):
        return None
    missing = [line.label for line in lines if not line.points]
    if missing:
        meaning = f"{meaning} Not recorded: {', '.join(missing)}."
    return PanelView(visible(title), visible(meaning), draw(lines, unit=unit, **shape), "")


def _said(value: Any) -> str:
    return NOT_RECORDED if value is None else text_of("", value)
