"""What curation dropped and why: counts for every filter with examples. On the terminal here, as a page in
`evaluation/curation_page.py`.

Questions come from data sets and answers from models, so nothing in them is trusted: no escape sequence reaches the
terminal.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from grpo_lab.visible import visible


@dataclass(frozen=True)
class DroppedExample:
    """A row that a filter dropped, as the report shows it: its number, its text cut to a readable length, why it went."""

    row: int
    text: str
    reason: str


@dataclass(frozen=True)
class FilterOutcome:
    """One filter: `before` rows came in, `dropped` of them went; `refused` counts all rows of the data that it would
    have dropped, those included that an earlier filter had dropped."""

    name: str
    setting: str
    before: int
    dropped: int
    refused: int
    examples: tuple[DroppedExample, ...] = ()

    @property
    def share(self) -> float:
        """dropped / before, 0 where nothing came in."""
        return self.dropped / self.before if self.before else 0.0


@dataclass(frozen=True)
class CurationReport:
    """A curation in numbers: rows that came in, rows kept, what each filter did, and notes in words."""

    title: str
    rows: int
    kept: int
    filters: tuple[FilterOutcome, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=True)

    def print(self, console: Any = None) -> None:
        """Show the report on a terminal (rich); `console` is a `rich.console.Console`, by default a new one."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = console or Console()
        table = Table(title=Text(f"{self.title}: {self.kept:,} of {self.rows:,} rows kept"))
        for heading in ("filter", "rule"):
            table.add_column(heading)
        for heading in ("before", "dropped", "share", "refused of all"):
            table.add_column(heading, justify="right")
        for one in self.filters:
            counts = (f"{one.before:,}", f"{one.dropped:,}", f"{one.share:.1%}", f"{one.refused:,}")
            table.add_row(Text(visible(one.name)), Text(visible(one.setting)), *counts)
        console.print(table)
        for one in self.filters:
            for example in one.examples[:2]:
                line = " ".join(visible(example.text).split())[:160]
                reason = f" ({visible(example.reason)[:120]})" if example.reason else ""
                console.print(Text(f"{one.name}, row {example.row}{reason}: {line}", style="dim"))
        for note in self.notes:
            console.print(Text(visible(note)))
