"""The page about a run of rounds: accuracy over rounds and over generated tokens, what was kept, how long answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.page import Card, Page, Section, Table, about, settings_section
from grpo_lab.evaluation.run_page import accuracy_cards, evaluation_sections, notices_of, title_of
from grpo_lab.evaluation.run_record import RunRecord
from grpo_lab.evaluation.terminal import NOT_RECORDED

Lines = Sequence[Mapping[str, float]]

ACCURACY = "{accuracy:.1%} [{accuracy_low:.1%}, {accuracy_high:.1%}]"
COLUMNS = [
    *[("", "round {round:.0f}"), ("held-out accuracy", ACCURACY)],
    *[("length", "{length:.1f}"), ("questions", "{questions:,.0f}"), ("samples", "{samples:,.0f}")],
    *[("right", "{right_share:.1%}"), ("kept", "{kept_share:.1%}"), ("ways a solved problem", "{ways:.2f}")],
    *[("rows (gold)", "{rows:,.0f} ({gold:,.0f})"), ("steps", "{steps:,.0f}"), ("tokens generated", "{tokens:,.0f}")],
    *[("sample length", "{sample_length:.1f}"), ("w(θ), first → last", "{weight_first:.3f} → {weight_last:.3f}")],
]  # fmt: skip
"""Of the table: the heading, and how a cell is written; a dash where a number is not there."""
_FOOT = (
    "Round 0 is the start model. Right: of the samples that could be scored. Kept: own rows (pairs) over samples. Ways: right answers "
    "that differ. Lengths in tokens. The same lines, unrounded: rounds.jsonl."
)


def rounds_page(record: RunRecord) -> Page:
    """Of `rounds.jsonl`, `run.json` and the evaluations of the start and of the last model."""
    run, lines = record.summary, record.rounds
    settings = {"method": run.get("method"), "seconds": run.get("seconds") or {}, **_mapping(run.get("recipe"))}
    settings["rounds"] = {"count": run.get("count"), **_mapping(settings.get("rounds"))}
    return Page(
        kind="rounds report",
        title=title_of(record),
        about=about({**run, **_mapping(settings.get("model"))}, "method", "path", "seconds"),
        cards=_cards(record),
        notices=notices_of(record),
        sections=[
            Section("Curves", figures=figures(lines)),
            Section("Rounds", table=rounds_table(lines), foot=_FOOT),
            *evaluation_sections(record),
            settings_section(
                {name: _left_closed(value) for name, value in settings.items() if value and name != "model_files"}
            ),
        ],
        missing=[] if lines else ["Rounds (rounds.jsonl)"],
    )


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _left_closed(value: Any) -> Any:
    """A section of the recipe without what it leaves open."""
    return {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, Mapping) else value


def _cards(record: RunRecord) -> list[Card]:
    """Accuracy from the evaluations of a finished run, of another from the lines that are there."""
    lines = record.rounds
    cards = accuracy_cards(record)
    for line in [] if cards else [line for line in lines if "accuracy" in line]:
        note = "95% interval {:.1f} – {:.1f}".format(*(100 * limit for limit in _limits(line)))
        cards.append(Card(f"Accuracy, round {line['round']:.0f}", f"{100 * line['accuracy']:.1f}", "%", note))
    tokens = (
        [Card("Tokens generated", f"{lines[-1]['tokens_total']:,.0f}")] if lines and "tokens_total" in lines[-1] else []
    )
    return [*cards, *tokens]


def rounds_table(lines: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]] = COLUMNS) -> Table:
    """One row a round; columns that no round has a number for are left out."""
    rows = [[_cell(how, line) for _, how in columns] for line in lines]
    kept = [place for place in range(len(columns)) if any(row[place] != NOT_RECORDED for row in rows)]
    return Table([columns[place][0] for place in kept], [[row[place] for place in kept] for row in rows], packed=True)


def _cell(how: str, line: Mapping[str, Any]) -> str:
    try:
        return how.format(**line)
    except (KeyError, TypeError):  # not there, or None
        return NOT_RECORDED


def figures(lines: Lines) -> list[Figure]:
    """Accuracy over rounds, accuracy over tokens, shares, lengths, and for pairs the weight w(θ)."""
    shares = [
        _series(lines, "right_share", "samples that are right"),
        _series(lines, "kept_share", "samples that are kept"),
    ]
    lengths = [_series(lines, "sample_length", "samples"), _series(lines, "length", "held-out answers")]
    weights = [_series(lines, "weight_first", "first log of the round"), _series(lines, "weight_last", "last log")]
    by_round: dict[str, Any] = {"x_unit": "round", "from_zero": True}
    over_tokens: dict[str, Any] = {**by_round, "x_unit": "tokens generated", "share": True}
    accuracy = "share of problems correct"
    found = [
        figure("Held-out accuracy", "With its 95% interval; round 0 is the start model.", [_accuracy(lines, "round")], accuracy,
               share=True, **by_round),
        figure("Accuracy over generated tokens", "What the gain cost in samples.", [_accuracy(lines, "tokens_total")], accuracy,
               **over_tokens),
        figure("What the model's own samples gave", "Kept: after one for each way of solving, and at most k a problem.", shares,
               "share of samples", share=True, **by_round),
        figure("Length", "Of answers with their end.", lengths, "tokens per completion", **by_round),
        figure("Weight of a pair, w(θ)", "1: the implicit reward has it wrong; ½: undecided; 0: learned.", weights, "mean over pairs",
               **by_round),
    ]  # fmt: skip
    return [one for one in found if one]


def _accuracy(lines: Lines, over: str) -> Line:
    measured = [line for line in lines if "accuracy" in line]
    return _series(measured, "accuracy", "held-out, greedy", over, [_limits(line) for line in measured if over in line])


def _limits(line: Mapping[str, float]) -> tuple[float, float]:
    return line.get("accuracy_low", line["accuracy"]), line.get("accuracy_high", line["accuracy"])


def _series(lines: Lines, key: str, label: str, over: str = "round", bars: Sequence[tuple[float, float]] = ()) -> Line:
    return Line(label, [(line[over], line[key]) for line in lines if key in line and over in line], bars, markers=True)
