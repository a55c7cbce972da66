"""What curation dropped and why: counts for every filter with examples, for the terminal and as one HTML file.

Questions come from data sets and answers from models, so nothing in them is trusted: the page escapes every text, has
no scripts and loads nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DroppedExample:
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
            table.add_row(Text(_printable(one.name)), Text(_printable(one.setting)), *counts)
        console.print(table)
        for one in self.filters:
            for example in one.examples[:2]:
                line = " ".join(_printable(example.text).split())[:160]
                reason = f" ({_printable(example.reason)[:120]})" if example.reason else ""
                console.print(Text(f"{one.name}, row {example.row}{reason}: {line}", style="dim"))
        for note in self.notes:
            console.print(Text(_printable(note)))

    def as_html(self) -> str:
        """The report as one page that needs nothing else."""
        from jinja2 import Environment

        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
        return page.render(report=self, widest=max([self.rows, 1]))

    def write_html(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(self.as_html().encode("utf-8", errors="replace"))


def _printable(text: str) -> str:
    """No escape sequences to the terminal, no half characters."""
    kept = "".join(
        character if character.isprintable() or character.isspace() else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
    return kept.replace("\r", " ")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ report.title }}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1c2430; background: #fff }
  h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
  table { border-collapse: collapse; width: 100% }
  th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #dde3ea; vertical-align: top }
  td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
  .bar { height: .7rem; background: #e8edf3; min-width: 10rem; display: flex }
  .left { background: #3b7dd8 } .gone { background: #d9793b }
  .quiet { color: #5b6776 } .text { white-space: pre-wrap; overflow-wrap: anywhere }
  @media (prefers-color-scheme: dark) { body { background: #14181d; color: #dfe6ee } th, td { border-color: #303943 }
    .bar { background: #262e37 } .quiet { color: #93a1b1 } }
</style></head><body>
<h1>{{ report.title }}</h1>
<p><b>{{ "{:,}".format(report.kept) }}</b> of {{ "{:,}".format(report.rows) }} rows kept
{% if report.rows %}({{ "{:.1%}".format(report.kept / report.rows) }}){% endif %}.</p>
<table><thead><tr><th>filter</th><th>rule</th><th class="number">before</th><th class="number">dropped</th>
<th class="number">share</th><th class="number">refused of all</th><th>left and dropped, of all rows</th></tr></thead><tbody>
{% for one in report.filters %}
<tr><td>{{ one.name }}</td><td>{{ one.setting }}</td><td class="number">{{ "{:,}".format(one.before) }}</td>
<td class="number">{{ "{:,}".format(one.dropped) }}</td><td class="number">{{ "{:.1%}".format(one.share) }}</td>
<td class="number">{{ "{:,}".format(one.refused) }}</td>
<td><div class="bar"><span class="left" style="width:{{ "%.2f" | format(100 * (one.before - one.dropped) / widest) }}%"></span>
<span class="gone" style="width:{{ "%.2f" | format(100 * one.dropped / widest) }}%"></span></div></td></tr>
{% endfor %}
</tbody></table>
<p class="quiet">A row is put down to the first filter that refused it; "refused of all" counts every row that the filter
would have dropped by itself.</p>
{% for note in report.notes %}<p>{{ note }}</p>{% endfor %}
{% for one in report.filters if one.examples %}
<h2>{{ one.name }}: examples of what was dropped</h2>
<table><thead><tr><th class="number">row</th><th>why</th><th>text</th></tr></thead><tbody>
{% for example in one.examples %}
<tr><td class="number">{{ example.row }}</td><td>{{ example.reason }}</td><td class="text">{{ example.text }}</td></tr>
{% endfor %}
</tbody></table>
{% endfor %}
</body></html>
"""
