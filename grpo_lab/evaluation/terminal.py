"""The last thing a run prints: before and after in one table, the paths, then the two lines that scripts look for.

The tables of other commands are printed from here too (`print_table`), and `comparison_rows` makes the rows that a page
shows as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from grpo_lab.diagnostics import Diagnosis
from grpo_lab.evaluation.result import EvaluationResult, paired_gain
from grpo_lab.evaluation.statistics import Interval
from grpo_lab.visible import visible

NOT_RECORDED = "–"
"""Text of a number that is missing."""
TRUNCATED_WARNING = 0.20
"""Share of truncated answers above which a warning is printed."""
LONGEST_HEADING = 60
"""Number of characters of a table's heading."""


class Terminal(Console):
    """Rich's console for text that is not trusted: markup in it has no effect, and every character is made visible."""

    def __init__(self, **given: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **given)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render as rich does, with every character of the text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def terminal_summary(
    before: EvaluationResult | None,
    after: EvaluationResult,
    *,
    title: str = "Held-out evaluation",
    report: str | Path | None = None,
    model_path: str | Path | None = None,
    seconds: float | None = None,
    health: Diagnosis | None = None,
    left_out: str | None = None,
    console: Terminal | None = None,
) -> None:
    """Print the end of a run: the table, warnings, the diagnosis, the paths, then `headline` and `lengths`.

    Lines outside the table are neither wrapped nor coloured, so that they can be searched for.

    Args:
        before: evaluation before training; None: there was none.
        after: evaluation after training.
        title: heading of the table.
        report: path of the HTML page.
        model_path: path of the trained model.
        seconds: wall-clock seconds of the run.
        health: diagnosis of the training.
        left_out: sentence about steps that were left out because a number was not finite.
        console: where to print.
    """
    console = console or Terminal()
    if len(title) > LONGEST_HEADING:  # rich would wrap it to the width of a narrow table
        console.print(title, style="bold", soft_wrap=True)
        title = "Held-out evaluation"
    console.print(_table(before, after, title))
    if after.sampled:
        console.print(f"sampled: {describe_sampling(after)}", style="dim")
    for warning in _warnings(after):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    took = None
    if seconds is not None:
        took = duration(seconds)
    training = [("training,", health.line if health else None), ("training,", left_out)]
    named = [*training, ("run time:", took), ("model:", model_path), ("report:", report)]
    lines = [f"{name} {said}" for name, said in named if said is not None]
    for line in [*lines, headline(before, after), lengths(before, after)]:
        console.print(line, soft_wrap=True)


def headline(before: EvaluationResult | None, after: EvaluationResult) -> str:
    """Return the line `held-out accuracy: before 0.314 after 0.726 (n=512)`; n counts the scorable problems of
    ``after``."""
    n = after.accuracy.n if after.accuracy else 0
    said = _three_digits(after.accuracy)
    if before is not None:
        said = f"before {_three_digits(before.accuracy)} after {said}"
    return f"held-out accuracy: {said} (n={n})"


def _three_digits(accuracy: Interval | None) -> str:
    if accuracy is None:
        return "nan"
    return f"{accuracy.value:.3f}"


def lengths(before: EvaluationResult | None, after: EvaluationResult) -> str:
    """Return the line `held-out length: before 5.9 after 27.3 tokens`, means over the greedy completions."""
    said = _written(after.mean_length)
    if before is not None:
        said = f"before {_written(before.mean_length)} after {said}"
    return f"held-out length: {said} tokens"


def _table(before: EvaluationResult | None, after: EvaluationResult, title: str) -> Table:
    """Make the table of a run, at most 80 columns wide: logs and pipes have no more."""
    heading = f"{title}, {after.n_problems} problems"
    look: Any = {"title_style": "bold", "title_justify": "left", "header_style": "bold", "padding": 0}
    table = Table(title=heading, box=box.SIMPLE_HEAD, **look)
    table.add_column("", no_wrap=True)
    for name in ["result"] if before is None else ["before", "after", "change"]:
        table.add_column(name, justify="right", no_wrap=True)
    for name, old, new, change in comparison_rows(before, after):
        style = None
        if name == "greedy accuracy":
            style = "bold"
        table.add_row(*[name, new] if before is None else [name, old, new, change], style=style)
    return table


def print_table(
    console: Console,
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    text: Collection[int] = (0,),
    **look: Any,
) -> None:
    """Print a table without breaking a word. If the table is too wide, cells wrap between words; if that is not enough,
    each row is printed as a list.

    Args:
        console: where to print.
        title: a line above the table; empty: none.
        head: headings of the columns.
        rows: cells, which are converted to text.
        text: indices of the columns that are left-aligned, as they hold no numbers.
        look: options of rich's table.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(head, *texts, strict=True))
    whole = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
    words = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    table = Table(title=Text(title) if title else None, box=box.SIMPLE_HEAD, title_justify="left", **look)
    for place, (name, width) in enumerate(zip(head, whole, strict=True)):
        table.add_column(name, justify="left" if place in text else "right", width=width)
    for row in texts:
        table.add_row(*row)
    room = console.width - (_width(console, table) - sum(whole))
    if sum(words) > room:
        _print_rows(console, title, head, texts)
        return
    for column, width in zip(table.columns, _narrowed(whole, words, room), strict=True):
        column.width = width
    console.print(table)


def fits(console: Console, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> bool:
    """Return whether a table fits on the console with every cell in one line."""
    table = Table(*head, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(str, row))
    return _width(console, table) <= console.width


def _width(console: Console, table: Table) -> int:
    """Return the width of a table that wraps nothing, in characters."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Shrink column ``widths`` until their sum is ``room``, the widest first and none below its ``least``."""
    found = list(widths)
    while sum(found) > room:
        widest = max(range(len(found)), key=lambda place: found[place] if found[place] > least[place] else 0)
        found[widest] -= 1
    return found


def _print_rows(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row as its first cell and, below it, the others with their headings. Lines are not wrapped."""
    if title:
        console.print(title, style="italic", soft_wrap=True)
    for first, *cells in rows:
        console.print(first, style="bold", soft_wrap=True)
        for name, cell in zip(head[1:], cells, strict=True):
            if cell:
                console.print(f"  {name} {cell}" if name else f"  {cell}", soft_wrap=True)


def describe_sampling(result: EvaluationResult) -> str:
    """Say how many samples were drawn at which temperature; empty if none were."""
    asked = result.settings
    sampled = f"{asked.get('n_samples')} samples a problem at temperature {asked.get('temperature')}"
    return sampled if result.sampled else ""


def comparison_rows(before: EvaluationResult | None, after: EvaluationResult) -> list[tuple[str, str, str, str]]:
    """Return (quantity, before, after, change) as texts, for the tables of the terminal and of the report.

    A change of a share is in percentage points, of a length in tokens; brackets are 95% intervals. Without ``before``
    its column and the change are dashes.
    """
    gain = None
    if before is not None:
        gain = paired_gain(before, after)
    old_accuracy = before.accuracy if before else None
    accuracy = ("greedy accuracy", _limits(old_accuracy), _limits(after.accuracy), points(gain))
    return [accuracy, *_share_rows(before, after), *_number_rows(before, after)]


def _share_rows(before: EvaluationResult | None, after: EvaluationResult) -> list[tuple[str, str, str, str]]:
    """Make the rows of accuracy by group and of the samples; their changes have no interval."""
    old_shares = {}
    if before:
        old_shares = dict(_other_shares(before))
    rows = []
    for name, share in _other_shares(after):
        old = old_shares.get(name)
        change = _change(old.value if old else None, share.value if share else None, 100)
        rows.append((name, _limits(old), _limits(share), change))
    return rows


def _number_rows(before: EvaluationResult | None, after: EvaluationResult) -> list[tuple[str, str, str, str]]:
    """Make the rows of the greedy completions' lengths and shares, and of the measures."""
    old_numbers: dict[str, Any] = {}
    if before is not None:
        old_numbers = before.numbers
    numbers = after.numbers
    rows = []
    for name, key in _NUMBERS.items():
        was = old_numbers.get(key)
        now = numbers[key]
        if key == "mean_thinking" and was is None and now is None:
            continue  # the model does not think
        if key.endswith("share"):
            rows.append((name, _written(was, "{:.1%}"), _written(now, "{:.1%}"), _change(was, now, 100)))
        else:
            rows.append((name, _written(was), _written(now), _change(was, now, 1)))
    for name, now in numbers["measures"].items():
        was = old_numbers.get("measures", {}).get(name)
        rows.append((name, _written(was, "{:.3f}"), _written(now, "{:.3f}"), _change(was, now, 1, "{:+.3f}")))
    return rows


_NUMBERS = {
    "tokens, mean": "mean_length",
    "tokens, correct": "mean_length_correct",
    "tokens, incorrect": "mean_length_incorrect",
    "thinking, mean": "mean_thinking",
    "worked out": "worked_out_share",
    "reflection words": "reflection_share",
    "truncated": "truncated_share",
    "unscorable": "unscorable_share",
}
"""Name of a row → name of the number in ``EvaluationResult.numbers``."""


def _other_shares(result: EvaluationResult) -> list[tuple[str, Interval | None]]:
    """Return (name, share) for accuracy by the column that the evaluation names, and for the samples."""
    by = [(f"{result.settings.get('by')} {group}", one) for group, one in result.accuracy_by.items()]
    return [*by, *_sampled_shares(result)]


def _sampled_shares(result: EvaluationResult) -> list[tuple[str, Interval | None]]:
    """Return (name, share) for the samples. pass@1, maj@1 and (since a tie is broken at random) maj@2 are left out:
    they equal the sampled accuracy."""
    if not result.sampled:
        return []
    return [
        ("sampled accuracy", result.sampled_accuracy),
        *((f"pass@{k}", interval) for k, interval in result.pass_at.items() if k > 1),
        *((f"maj@{k}", interval) for k, interval in result.majority_at.items() if k > 2),
    ]


def _warnings(after: EvaluationResult) -> list[str]:
    """Return what a reader should know of an evaluation: problems left out, answers cut off, problems that could not be
    scored."""
    found = after.gaps
    cut = after.numbers["truncated_share"]
    unscorable = after.numbers["unscorable_share"]
    if cut is not None and cut > TRUNCATED_WARNING:
        budget = after.settings.get("max_new_tokens")
        found.append(
            f"{cut:.1%} of the answers were cut off at max_new_tokens={budget}; a higher limit may raise the accuracy"
        )
    if unscorable:
        found.append(f"{unscorable:.1%} of the problems could not be scored and are in no accuracy")
    return found


def duration(seconds: float) -> str:
    """Format seconds as a person says them: `3 h 05 min`, `2 min 07 s`, `4.2 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{seconds:.1f} s"


def _limits(interval: Interval | None) -> str:
    if interval is None:
        return NOT_RECORDED
    return f"{100 * interval.value:.1f}% [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def points(gain: Interval | None) -> str:
    """Format a difference of shares in percentage points, with its interval; None as a dash."""
    if gain is None:
        return NOT_RECORDED
    return f"{100 * gain.value:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _change(old: float | None, new: float | None, scale: int, how: str = "{:+.1f}") -> str:
    if old is None or new is None:
        return NOT_RECORDED
    return how.format(scale * (new - old))


def _written(value: float | None, how: str = "{:.1f}") -> str:
    if value is None:
        return NOT_RECORDED
    return how.format(value)
