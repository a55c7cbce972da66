"""Rounds on a page: curves, and a table with a row for each round.

A round is one turn of `grpo-lab rounds`: sample, choose, train, evaluate. Its numbers are a line of `rounds.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.page import Section, Table
from grpo_lab.evaluation.terminal import NOT_RECORDED

Lines = Sequence[Mapping[str, float]]
"""Numbers of each round, by name."""

ACCURACY = "{accuracy:.1%} [{accuracy_low:.1%}, {accuracy_high:.1%}]"
COLUMNS = [
    ("", "round {round:.0f}"),
    ("held-out accuracy", ACCURACY),
    ("length", "{length:.1f}"),
    ("questions", "{questions:,.0f}"),
    ("samples", "{samples:,.0f}"),
    ("right", "{right_share:.1%}"),
    ("kept", "{kept_share:.1%}"),
    ("ways a solved problem", "{ways:.2f}"),
    ("rows (gold)", "{rows:,.0f} ({gold:,.0f})"),
    ("steps", "{steps:,.0f}"),
    ("tokens generated", "{tokens:,.0f}"),
    ("sample length", "{sample_length:.1f}"),
    ("w(θ), first → last", "{weight_first:.3f} → {weight_last:.3f}"),
]
"""Columns of the table: heading, and format string of a cell. A cell whose number is missing is a dash."""
_FOOT = (
    "Round 0 is the start model. Right: of the samples that could be scored. Kept: own rows (pairs) over samples. "
    "Ways: right answers that differ. Lengths in tokens. The same lines, unrounded: rounds.jsonl."
)


def rounds_sections(lines: Lines) -> list[Section]:
    """Make the sections about rounds: the curves, then the table."""
    return [
        Section("Curves", figures=rounds_figures(lines)),
        Section("Rounds", table=rounds_table(lines), foot=_FOOT),
    ]


def rounds_table(lines: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]] = COLUMNS) -> Table:
    """Make a table with a row for each round.

    Args:
        lines: the numbers of each round.
        columns: (heading, format string of a cell); columns that no round has a number for are left out.
    """

    def cell(how: str, line: Mapping[str, Any]) -> str:
        try:
            return how.format(**line)
        except (KeyError, TypeError):  # the number is missing, or None
            return NOT_RECORDED

    rows = [[cell(how, line) for _, how in columns] for line in lines]
    kept = [place for place in range(len(columns)) if any(row[place] != NOT_RECORDED for row in rows)]
    return Table([columns[place][0] for place in kept], [[row[place] for place in kept] for row in rows], packed=True)


def rounds_figures(lines: Lines) -> list[Figure]:
    """Draw accuracy over rounds and over generated tokens, shares of samples, lengths, and, where a method trains on
    pairs, their weight w(θ). Figures without a number are left out."""

    def drawn(title: str, meaning: str, unit: str, *series: Line, over: str = "round", **shape: Any) -> Figure | None:
        return figure(title, meaning, series, unit, x_unit=over, from_zero=True, **shape)

    def series(key: str, label: str, over: str = "round") -> Line:
        found = [line for line in lines if key in line and over in line]
        bars = []
        if key == "accuracy":
            bars = [accuracy_limits(line) for line in found]
        return Line(label, [(line[over], line[key]) for line in found], bars, markers=True)

    accuracy = "share of problems correct"
    tokens = "tokens generated"
    greedy = "held-out, greedy"
    note = "With its 95% interval; round 0 is the start model."
    samples = series("right_share", "samples that are right"), series("kept_share", "samples that are kept")
    kept_note = "Kept: after one for each way of solving, and at most k a problem."
    sizes = series("sample_length", "samples"), series("length", "held-out answers")
    weights = series("weight_first", "first log of the round"), series("weight_last", "last log")
    weight_note = "1: the implicit reward has it wrong; ½: undecided; 0: learned."
    cost = "What the gain cost in samples."
    spent = series("accuracy", greedy, "tokens_total")
    found = [
        drawn("Held-out accuracy", note, accuracy, series("accuracy", greedy), share=True),
        drawn("Accuracy over generated tokens", cost, accuracy, spent, over=tokens, share=True),
        drawn("What the model's own samples gave", kept_note, "share of samples", *samples, share=True),
        drawn("Length", "Of answers with their end.", "tokens per completion", *sizes),
        drawn("Weight of a pair, w(θ)", weight_note, "mean over pairs", *weights),
    ]
    return [one for one in found if one]


def accuracy_limits(line: Mapping[str, float]) -> tuple[float, float]:
    """Return the interval of a round's accuracy; without one, the accuracy twice."""
    return line.get("accuracy_low", line["accuracy"]), line.get("accuracy_high", line["accuracy"])
