"""Apply filters to rows, and keep every score that a row was given.

    selection = Selection(rows, shown="prompt")
    selection.score("kind", [question_kind(row["prompt"]) for row in rows])
    selection.keep("open questions", [...mask over all rows...], reasons=[...])
    selection.kept_rows(), selection.scored_rows(), selection.report()

Every filter judges all rows. So the order of the filters only decides to which of them a dropped row is attributed: the
first that refused it. The report also counts what each filter alone would have refused. `CurationReport.print` shows it
on the terminal, and `evaluation/curation_page.py` as a page.

`balance` keeps at most the same number of rows from every domain. Kimi k1.5 (section 2.1) and Qwen3 (section 4.2)
balance subjects and difficulties without saying how. A limit per domain with a random choice inside it is ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lab.visible import visible


@dataclass(frozen=True)
class DroppedExample:
    """A dropped row as the report shows it: its index, its text cut to a readable length, and the reason."""

    row: int
    text: str
    reason: str


@dataclass(frozen=True)
class FilterOutcome:
    """Outcome of one filter.

    Attributes:
        name: the filter's name.
        setting: its rule, in words.
        before: number of rows that earlier filters had left.
        dropped: how many of these it dropped.
        refused: how many rows of the whole data it would drop, including those that an earlier filter had dropped.
        examples: a few of the rows that it dropped.
    """

    name: str
    setting: str
    before: int
    dropped: int
    refused: int
    examples: tuple[DroppedExample, ...] = ()

    @property
    def share(self) -> float:
        """Fraction of the rows that reached the filter and were dropped by it; 0 if none reached it."""
        if self.before:
            return self.dropped / self.before
        return 0.0


@dataclass(frozen=True)
class CurationReport:
    """A curation in numbers: its title, rows before, rows kept, what each filter did, and notes in words."""

    title: str
    rows: int
    kept: int
    filters: tuple[FilterOutcome, ...]
    notes: tuple[str, ...] = ()

    def print(self, console: Any = None) -> None:
        """Print the report on a terminal (rich); `console` is a `rich.console.Console`, by default a new one."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = console or Console()
        table = Table("filter", "rule", title=Text(f"{self.title}: {self.kept:,} of {self.rows:,} rows kept"))
        for heading in ("before", "dropped", "share", "refused of all"):
            table.add_column(heading, justify="right")
        for one in self.filters:
            counts = (f"{one.before:,}", f"{one.dropped:,}", f"{one.share:.1%}", f"{one.refused:,}")
            table.add_row(Text(visible(one.name)), Text(visible(one.setting)), *counts)
        console.print(table)
        for one in self.filters:
            for example in one.examples[:2]:
                line = " ".join(visible(example.text).split())[:160]
                reason = ""
                if example.reason:
                    reason = f" ({visible(example.reason)[:120]})"
                console.print(Text(f"{one.name}, row {example.row}{reason}: {line}", style="dim"))
        for note in self.notes:
            console.print(Text(visible(note)))


_EXAMPLES = 5
_SHOWN_CHARACTERS = 600


class Selection:
    """Rows, their scores, and the filters applied so far.

    Args:
        rows: the data.
        shown: the column that reports quote, with a text or message list; every row must have it.
        title: title of the report.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, shown: str = "prompt", title: str = "curation") -> None:
        for index, row in enumerate(rows):
            if shown not in row:
                raise ValueError(f"row {index} has no column {shown!r} (shown); its columns: {sorted(row)}")
        self._rows = rows
        self._shown = shown
        self._title = title
        self._scores: dict[str, Sequence[Any]] = {}
        self._dropped_by: list[str | None] = [None] * len(rows)
        self._outcomes: list[FilterOutcome] = []

    def score(self, name: str, values: Sequence[Any]) -> None:
        """Add a column of scores; `values` has one entry per row. Raises ValueError if there is such a column."""
        self._check_length(name, values)
        if name in self._scores or (self._rows and name in self._rows[0]) or name in {"kept", "dropped_by"}:
            raise ValueError(f"the rows have a column {name!r} already; give the score another name")
        self._scores[name] = values

    def keep(
        self, name: str, mask: Sequence[bool], *, setting: str = "", reasons: Sequence[str | None] | None = None
    ) -> None:
        """Apply a filter.

        Args:
            name: its name, which no other filter has.
            mask: one entry for *every* row, also for those that are dropped already; True keeps the row.
            setting: the filter's rule in words, for reports.
            reasons: for every row, why it is refused, for reports; None: the filter gives no reasons.
        """
        why = [None] * len(self._rows) if reasons is None else reasons
        self._check_length(name, mask)
        self._check_length(f"reasons of {name}", why)
        if any(outcome.name == name for outcome in self._outcomes):
            raise ValueError(f"the filter {name!r} was applied already")
        refused = [index for index, kept in enumerate(mask) if not kept]
        newly = [index for index in refused if self._dropped_by[index] is None]
        before = sum(self.mask)
        for index in newly:
            self._dropped_by[index] = name
        count = min(_EXAMPLES, len(newly))  # evenly over the data, not all from its beginning
        spread = [newly[place * len(newly) // count] for place in range(count)]
        texts = [shown_text(self._rows[index][self._shown]) for index in spread]
        examples = tuple(DroppedExample(at, text, why[at] or "") for at, text in zip(spread, texts, strict=True))
        self._outcomes.append(FilterOutcome(name, setting, before, len(newly), len(refused), examples))

    @property
    def mask(self) -> list[bool]:
        """True for each row that no filter has dropped."""
        return [by is None for by in self._dropped_by]

    def kept_rows(self) -> list[dict[str, Any]]:
        """Return the rows that are left, with every score as a column."""
        return [self._scored(index) for index, kept in enumerate(self.mask) if kept]

    def scored_rows(self) -> list[dict[str, Any]]:
        """Return all rows, with every score, `kept`, and `dropped_by` (the first filter that refused it) as columns."""
        by_row = enumerate(self._dropped_by)
        return [{**self._scored(index), "kept": by is None, "dropped_by": by} for index, by in by_row]

    def scored_columns(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the rows with their scores, column by column, so that no second copy of all rows is in memory."""
        for name in self._rows[0] if self._rows else ():
            yield name, [row[name] for row in self._rows]
        yield from ((name, list(values)) for name, values in self._scores.items())
        yield "kept", self.mask
        yield "dropped_by", list(self._dropped_by)

    def _scored(self, index: int) -> dict[str, Any]:
        return {**self._rows[index], **{name: values[index] for name, values in self._scores.items()}}

    def report(self, notes: Sequence[str] = ()) -> CurationReport:
        """Return the report of the filters so far."""
        return CurationReport(self._title, len(self._rows), sum(self.mask), tuple(self._outcomes), tuple(notes))

    def _check_length(self, name: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._rows):
            raise ValueError(f"{name}: {len(values)} values for {len(self._rows)} rows; every row has one")


def shown_text(prompt: Any) -> str:
    """Return the text of a prompt (a text or a list of messages), cut to the length that a report shows."""
    if isinstance(prompt, str):
        text = prompt
    else:
        text = "\n".join(str(message.get("content", "")) for message in prompt)
    return text[:_SHOWN_CHARACTERS]


def balance(
    rows: Sequence[Mapping[str, Any]],
    by: str | Callable[[Mapping[str, Any]], Hashable],
    per_domain: int | Mapping[Any, int] | None = None,
    seed: int = 0,
) -> list[bool]:
    """Return for each row whether it is kept, so that no domain has more rows than its limit. Which rows of a domain
    are kept is drawn at random.

    Args:
        rows: the data.
        by: the column that names the domain, or a function of the row. A row without a value (`is_missing`) has no
            domain and is not kept; such rows never count as the smallest domain.
        per_domain: limit of rows per domain, one number for all or one for each domain; None takes the size of the
            smallest domain. A domain with fewer rows keeps them all.
        seed: seed of the draw, which does not depend on other domains.

    Raises ValueError if a column is missing, no row has a value, a number is negative, or a `per_domain` mapping lacks
    a domain.
    """
    members: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        if isinstance(by, str) and by not in row:
            raise ValueError(f"row {index} has no column {by!r} to balance by; its columns: {sorted(row)}")
        domain = row[by] if isinstance(by, str) else by(row)
        if not is_missing(domain):
            members.setdefault(domain, []).append(index)
    if rows and not members:
        raise ValueError(f"none of the {len(rows)} rows has a value of {by!r} to balance by")
    if per_domain is None:
        per_domain = min(map(len, members.values()), default=0)
    keep = [False] * len(rows)
    for domain, indices in members.items():
        if isinstance(per_domain, Mapping) and domain not in per_domain:
            raise ValueError(f"per_domain names {sorted(map(str, per_domain))} and the data has domain {domain!r}")
        if isinstance(per_domain, Mapping):
            share = per_domain[domain]
        else:
            share = per_domain
        if share < 0:
            raise ValueError(f"per_domain={share} for domain {domain!r} is negative")
        for index in random.Random(f"{seed}/{domain}").sample(indices, min(share, len(indices))):
            keep[index] = True
    return keep


def is_missing(value: Any) -> bool:
    """Return whether a value names no domain: None, NaN or an empty text."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())
