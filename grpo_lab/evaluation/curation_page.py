"""The page about a curation: what stayed, what went and why, how hard the problems are. In the look of the run report.

Questions come from data sets and answers from models, so nothing in them is trusted: every text is escaped and shown
with its invisible characters, the page has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.curation import CurationReport
from grpo_lab.evaluation.files import encodable, write_text
from grpo_lab.evaluation.page import page
from grpo_lab.evaluation.report import summary_groups

_KEPT_SHOWN = 6
_CHARACTERS = 600


@dataclass(frozen=True)
class Bar:
    """Problems whose pass rate lies in one interval."""

    label: str
    kept: int
    dropped: int


def write_curation_page(
    path: str | Path,
    report: CurationReport,
    summary: Mapping[str, Any] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the page.

    Args:
        summary: how it was made, for the list of settings.
        rows: all rows with `kept`, and `pass_rate` where it was measured (`Selection.scored_rows`), for the histogram and
            for examples of what stayed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, encodable(curation_page(report, summary, rows)))
    return path


def curation_page(
    report: CurationReport, summary: Mapping[str, Any] | None = None, rows: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page as text; see `write_curation_page`."""
    bars = histogram(rows)
    return page(
        "curation.html.j2",
        report=report,
        summary=summary_groups({k: v for k, v in (summary or {}).items() if k != "finished"}),
        widest=max(report.rows, 1),
        bars=bars,
        highest=max((bar.kept + bar.dropped for bar in bars), default=0) or 1,
        mean_rate=_mean_rate(rows),
        examples=kept_examples(rows),
    )


def histogram(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Pass rates in twelve bars: exactly 0, ten tenths (k/10, (k+1)/10] without the ends, exactly 1. Empty without rates."""
    counts = [[0, 0] for _ in range(12)]
    for row in rows:
        rate = row.get("pass_rate")
        if rate is not None:
            # a tenth that is not exact in binary (0.3 = 0.30000000000000004) belongs to the bar that it ends
            place = 0 if rate <= 0 else 11 if rate >= 1 else 1 + min(9, max(0, int(-(-round(rate * 10, 9) // 1)) - 1))
            counts[place][0 if row.get("kept") else 1] += 1
    if not any(kept + dropped for kept, dropped in counts):
        return []
    labels = ["0", *(f"{k / 10:.1f}" for k in range(1, 10)), "<1", "1"]
    return [Bar(label, *pair) for label, pair in zip(labels, counts, strict=True)]


def kept_examples(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str, str]]:
    """(row, question, gold, pass rate) of rows that stayed, evenly from hard to easy, or over the data without rates."""
    kept = [(number, row) for number, row in enumerate(rows) if row.get("kept")]
    kept.sort(key=lambda pair: -1.0 if pair[1].get("pass_rate") is None else float(pair[1]["pass_rate"]))
    count = min(_KEPT_SHOWN, len(kept))
    chosen = [kept[place * (len(kept) - 1) // max(count - 1, 1)] for place in range(count)]
    return [
        (
            number,
            _question(row),
            str(row.get("solution", ""))[:80],
            "" if row.get("pass_rate") is None else f"{row['pass_rate']:.2f}",
        )
        for number, row in chosen
    ]


def _question(row: Mapping[str, Any]) -> str:
    text = row.get("question") or row.get("prompt") or ""
    if not isinstance(text, str):
        text = "\n".join(str(message.get("content", "")) for message in text)
    return text[:_CHARACTERS]


def _mean_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    rates = [row["pass_rate"] for row in rows if row.get("kept") and row.get("pass_rate") is not None]
    return sum(rates) / len(rates) if rates else None
