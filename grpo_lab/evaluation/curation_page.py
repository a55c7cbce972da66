"""The page about a curation: what stayed, what went and why, how hard the problems are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lab.curation import CurationReport
from grpo_lab.curation.selection import DroppedExample, FilterOutcome, shown_text
from grpo_lab.evaluation.page import Bar, Card, Page, Section, Table, about, settings_section
from grpo_lab.reading import read_record

Rows = Sequence[Mapping[str, Any]]
_KEPT_SHOWN = 6
"""Number of kept rows that the page shows."""
_REASON = 300
"""Number of characters of a reason that the page shows."""
_RATES = (
    'Problems by the share of right completions. "0" and "1" are exact; every other bar holds what lies above the '
    "label before it, up to its own."
)
_KEPT = "From the hardest to the easiest in even steps; nothing is picked for looks."


def curation_page(report: CurationReport, summary: Mapping[str, Any] | None = None, rows: Rows = ()) -> Page:
    """Make the page about a curation.

    Args:
        report: the curation in numbers.
        summary: the contents of `curation.json`, shown as settings; None: no settings are shown.
        rows: all rows, kept and dropped, with their column `kept`, and `pass_rate` if it was measured
            (`Selection.scored_rows`). They give the histogram and the examples of kept rows.
    """
    rates = [row["pass_rate"] for row in rows if row.get("kept") and row.get("pass_rate") is not None]
    if report.rows:
        share = f"{report.kept / report.rows:.1%} of the rows"
    else:
        share = "no rows"
    mean = []
    if rates:
        mean = [Card("Mean pass rate of the kept", f"{100 * sum(rates) / len(rates):.1f}", "%")]
    settings = {name: value for name, value in (summary or {}).items() if name not in ("finished", "report")}
    stayed = Table(["row", "question", "gold", "pass rate"], kept_examples(rows), words={1})
    return Page(
        kind="curation report",
        title=report.title,
        about=about(settings, "data", "model", "time"),
        cards=[Card("Rows in", f"{report.rows:,}"), Card("Rows kept", f"{report.kept:,}", "", share, True), *mean],
        notices=report.notes,
        sections=[
            _filters(report),
            Section("Pass rates", legend=("kept", "dropped"), bars=histogram(rows), foot=_RATES),
            Section("What stayed", table=stayed, foot=_KEPT),
            *(Section(f"Dropped: {one.name}", table=_dropped(one)) for one in report.filters if one.examples),
            settings_section(settings),
        ],
    )


def read_curation(folder: Path) -> Page:
    """Make the page about the curation in ``folder``, from its `curation.json` and `all.parquet`. Without `all.parquet`
    the page says that the rows are missing.

    Raises:
        ValueError: the curation is not finished, or a file is damaged.
    """
    try:
        found = read_record(folder / "curation.json")
        if found.get("finished"):
            return _finished_page(found, folder / "all.parquet")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} holds a curation that cannot be read: {type(error).__name__}: {error}") from error
    raise ValueError(f"{folder} holds a curation that is not finished; the same `grpo-lab curate` goes on with it")


def _finished_page(found: Mapping[str, Any], table: Path) -> Page:
    """Make the page of a finished curation, from its `curation.json` (``found``) and the file of its rows."""
    written = found["report"]
    filters = []
    for one in written["filters"]:
        examples = tuple(DroppedExample(**example) for example in one["examples"])
        filters.append(FilterOutcome(**{**one, "examples": examples}))
    report = CurationReport(**{**written, "filters": tuple(filters), "notes": tuple(written["notes"])})
    if not table.is_file():
        return replace(curation_page(report, found), missing=["Rows (all.parquet)"])
    return curation_page(report, found, _read_rows(table))


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Read what the page needs of the rows in ``file``: `kept` and `pass_rate` of all, and every column of the few that
    are shown."""
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    rows: list[dict[str, Any]] = table.select(
        [one for one in ("kept", "pass_rate") if one in table.schema.names]
    ).to_pylist()
    for number in _shown_rows(rows):
        rows[number] = table.slice(number, 1).to_pylist()[0]
    return rows


def _filters(report: CurationReport) -> Section:
    """Make the section with a row for each filter: its rule, and how many rows it dropped."""
    rows: list[list[str | Bar]] = []
    for one in report.filters:
        counts = [f"{one.before:,}", f"{one.dropped:,}", f"{one.share:.1%}", f"{one.refused:,}"]
        bar = Bar(one.before - one.dropped, one.dropped, max(report.rows, 1))
        rows.append([one.name, one.setting, *counts, bar])
    head = ["filter", "rule", "before", "dropped", "share", "refused of all", "of all rows"]
    foot = (
        'A row is put down to the first filter that refused it. "Refused of all" counts what the filter refused by '
        "itself, among all rows for filters that read the text, among the rows left to it for those that ask the model."
    )
    return Section("Filters", legend=("left", "dropped here"), table=Table(head, rows, words={1, 6}), foot=foot)


def histogram(rows: Rows) -> list[Bar]:
    """Count kept and dropped rows by pass rate, in twelve bars: exactly 0; ten tenths (k/10, (k+1)/10] without 0 and 1;
    exactly 1.

    Rows without a pass rate are not counted. If none has one, there are no bars.
    """
    counts = [[0, 0] for _ in range(12)]
    for row in rows:
        rate = row.get("pass_rate")
        if rate is not None:
            counts[_bar_of(rate)][0 if row.get("kept") else 1] += 1
    highest = max(map(sum, counts))
    if not highest:
        return []
    labels = ["0", *(f"{k / 10:.1f}" for k in range(1, 10)), "<1", "1"]
    return [Bar(kept, dropped, highest, label) for label, (kept, dropped) in zip(labels, counts, strict=True)]


def _bar_of(rate: float) -> int:
    """Return the number of the bar of `histogram` that counts a pass rate."""
    if rate <= 0:
        return 0
    if rate >= 1:
        return 11
    tenths = round(rate * 10, 9)  # 3/10 is no binary fraction, and must not pass into the next bar
    return min(10, max(1, math.ceil(tenths)))


def kept_examples(rows: Rows) -> list[tuple[str, str, str, str]]:
    """Return (row number, question, gold, pass rate) of some kept rows, in even steps from the hardest to the easiest;
    without pass rates, in even steps over the data."""
    found = []
    for number in _shown_rows(rows):
        row = rows[number]
        question = shown_text(row.get("question") or row.get("prompt") or "")
        rate = row.get("pass_rate")
        gold = str(row.get("solution", ""))[:80]
        found.append((str(number), question, gold, "–" if rate is None else f"{rate:.2f}"))
    return found


def _shown_rows(rows: Rows) -> list[int]:
    """Return the numbers of the rows that `kept_examples` shows."""
    rates = {number: row.get("pass_rate") for number, row in enumerate(rows) if row.get("kept")}
    kept = sorted(rates, key=lambda number: -1.0 if (rate := rates[number]) is None else float(rate))
    count = min(_KEPT_SHOWN, len(kept))
    return [kept[place * (len(kept) - 1) // max(count - 1, 1)] for place in range(count)]


def _dropped(one: FilterOutcome) -> Table:
    """Make the table of examples of what a filter dropped."""
    rows = [(str(e.row), e.reason[:_REASON], e.text) for e in one.examples]
    return Table(["row", "why", "question"], rows, words={1, 2})
