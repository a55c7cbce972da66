"""Rows going through filters, with every score they were given.

    selection = Selection(rows, shown="prompt")
    selection.score("kind", [question_kind(row["prompt"]) for row in rows])
    selection.keep("open questions", [...mask over all rows...], reasons=[...])
    selection.kept_rows(), selection.scored_rows(), selection.report()

Filters see all rows, so the order of the filters decides only to which one a dropped row is put down: the first that
refused it. What else would have refused it is counted as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.curation.report import CurationReport, DroppedExample, FilterOutcome

_EXAMPLES = 5
_SHOWN_CHARACTERS = 600


class Selection:
    """See the module. `shown` is the column (str or message list) that examples in the report are shown by."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, shown: str = "prompt", title: str = "curation") -> None:
        for index, row in enumerate(rows):
            if shown not in row:
                raise ValueError(f"row {index} has no column {shown!r} (shown); its columns: {sorted(row)}")
        self._rows, self._shown, self._title = rows, shown, title
        self._scores: dict[str, Sequence[Any]] = {}
        self._dropped_by: list[str | None] = [None] * len(rows)
        self._outcomes: list[FilterOutcome] = []

    def score(self, name: str, values: Sequence[Any]) -> None:
        """Add a column to the scored rows; `values` runs along the rows."""
        self._check_length(name, values)
        if name in self._scores or (self._rows and name in self._rows[0]) or name in {"kept", "dropped_by"}:
            raise ValueError(f"the rows have a column {name!r} already; give the score another name")
        self._scores[name] = values

    def keep(
        self, name: str, mask: Sequence[bool], *, setting: str = "", reasons: Sequence[str | None] | None = None
    ) -> None:
        """Apply a filter.

        Args: mask: one bool a row, True keeps it, over *all* rows. setting: the rule in words, for the report.
            reasons: why each row was refused, for the examples.
        """
        self._check_length(name, mask)
        if reasons is not None:
            self._check_length(f"reasons of {name}", reasons)
        if any(outcome.name == name for outcome in self._outcomes):
            raise ValueError(f"the filter {name!r} was applied already")
        refused = [index for index, kept in enumerate(mask) if not kept]
        newly = [index for index in refused if self._dropped_by[index] is None]
        before = sum(by is None for by in self._dropped_by)
        for index in newly:
            self._dropped_by[index] = name
        examples = [self._example(index, reasons) for index in _spread(newly, _EXAMPLES)]
        self._outcomes.append(FilterOutcome(name, setting, before, len(newly), len(refused), tuple(examples)))

    @property
    def mask(self) -> list[bool]:
        """Which rows are left."""
        return [by is None for by in self._dropped_by]

    def kept_rows(self) -> list[dict[str, Any]]:
        """The rows that are left, with every score as a column."""
        return [
            {**row, **{name: values[index] for name, values in self._scores.items()}}
            for index, row in enumerate(self._rows)
            if self._dropped_by[index] is None
        ]

    def scored_rows(self) -> list[dict[str, Any]]:
        """All rows, with every score as a column, `kept` and `dropped_by` (the first filter that refused it, or None)."""
        return [
            {
                **row,
                **{name: values[index] for name, values in self._scores.items()},
                "kept": self._dropped_by[index] is None,
                "dropped_by": self._dropped_by[index],
            }
            for index, row in enumerate(self._rows)
        ]

    def report(self, notes: Sequence[str] = ()) -> CurationReport:
        return CurationReport(self._title, len(self._rows), sum(self.mask), tuple(self._outcomes), tuple(notes))

    def _check_length(self, name: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._rows):
            raise ValueError(
                f"{name}: {len(values)} values for {len(self._rows)} rows; filters and scores see all rows"
            )

    def _example(self, index: int, reasons: Sequence[str | None] | None) -> DroppedExample:
        shown = self._rows[index][self._shown]
        text = shown if isinstance(shown, str) else _of_messages(shown)
        return DroppedExample(index, text[:_SHOWN_CHARACTERS], (reasons[index] if reasons else None) or "")


def _of_messages(messages: Any) -> str:
    if not isinstance(messages, Sequence):
        return str(messages)
    return "\n".join(str(m.get("content", "")) if isinstance(m, Mapping) else str(m) for m in messages)


def _spread(indices: list[int], count: int) -> list[int]:
    """`count` of the indices, evenly over the data, so that examples do not all come from its beginning."""
    if len(indices) <= count:
        return indices
    return [indices[position * len(indices) // count] for position in range(count)]
