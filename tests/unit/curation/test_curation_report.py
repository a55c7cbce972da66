"""Selection and report: counts, the first filter to refuse, scores as columns, and text that must not become markup."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_lab.curation import CurationReport, Selection
from grpo_lab.evaluation.curation_page import curation_page
from grpo_lab.pipelines.curate import write_rows

ROWS = [{"prompt": f"question {k}", "solution": str(k)} for k in range(10)]


def selection() -> Selection:
    chosen = Selection(ROWS, title="a set")
    chosen.score("pass_rate", [k / 10 for k in range(10)])
    chosen.keep("even", [k % 2 == 0 for k in range(10)], setting="k even")
    chosen.keep("band", [2 < k < 9 for k in range(10)], setting="2 < k < 9", reasons=[f"k = {k}" for k in range(10)])
    return chosen


def test_counts_and_columns() -> None:
    chosen = selection()
    report = chosen.report(["one note"])
    even, band = report.filters
    assert (even.before, even.dropped, even.refused) == (10, 5, 5)
    assert (band.before, band.dropped, band.refused) == (5, 2, 4)  # 0 and 2 go; 1 and 9 had gone
    assert (report.rows, report.kept) == (10, 3)
    assert band.share == 0.4
    assert chosen.mask == [k in (4, 6, 8) for k in range(10)]
    assert chosen.kept_rows()[0] == {"prompt": "question 4", "solution": "4", "pass_rate": 0.4}
    rows = chosen.scored_rows()
    assert len(rows) == 10
    assert [row["dropped_by"] for row in rows[:4]] == ["band", "even", "band", "even"]
    assert [example.reason for example in band.examples] == ["k = 0", "k = 2"]


def test_examples_are_spread_over_the_data() -> None:
    chosen = Selection([{"prompt": str(k)} for k in range(1000)])
    chosen.keep("all", [False] * 1000)
    assert [example.row for example in chosen.report().filters[0].examples] == [0, 200, 400, 600, 800]


def test_bad_input_is_named() -> None:
    chosen = selection()
    with pytest.raises(ValueError, match="3 values for 10 rows"):
        chosen.keep("short", [True] * 3)
    with pytest.raises(ValueError, match="applied already"):
        chosen.keep("even", [True] * 10)
    with pytest.raises(ValueError, match="'solution' already"):
        chosen.score("solution", [0] * 10)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        Selection([{"question": "?"}])


def hostile() -> CurationReport:
    texts = ["<script>alert(1)</script>", "[bold red]x[/] [/nonsense]", "\x1b[2J\x1b]0;title\x07", "\ud800 half", ""]
    texts.append("A" * 100_000)
    chosen = Selection([{"prompt": text} for text in texts], title="</title><script>")
    chosen.keep("<b>name</b>", [False] * 6, setting="{{ 7*7 }}", reasons=texts)
    return chosen.report(["<img src=x>"])


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    page = curation_page(hostile()).write(tmp_path / "report.html").read_text("utf-8")
    assert "<script" not in page
    assert "<img" not in page
    assert "49" not in page.split("<tbody>")[1].split("</tbody>")[0].replace("{{ 7*7 }}", "")
    assert len(page) < 20_000
    assert "http" not in page.replace("http-equiv", "")  # loads nothing
    shown = io.StringIO()
    hostile().print(Console(file=shown, width=120, force_terminal=False))
    assert "\x1b" not in shown.getvalue()
    assert "[bold red]x[/]" in shown.getvalue()


def test_on_a_phone_every_number_of_a_filter_has_its_name() -> None:
    """There a row is a list: a cell without a label would be a number without a meaning, a scrolled table hides
    columns."""
    page = curation_page(selection().report()).html()
    table = page[page.index("<h2>Filters") : page.index("</table>")]
    assert '<table class="stacked">' in table
    row = table[table.index("<tbody>") : table.index("</tr>", table.index("<tbody>"))]
    assert re.findall(r'<td data-label="([^"]*)"', row) == ["before", "dropped", "share", "refused of all"]
    assert 'class="stack"' in row
    style = page[page.index("@media (max-width: 640px)") : page.index("</style>")]
    assert ".stacked td[data-label]::before { content: attr(data-label)" in style


def test_the_terminal_shows_every_filter() -> None:
    shown = io.StringIO()
    selection().report().print(Console(file=shown, width=120))
    for piece in ("3 of 10 rows kept", "even", "2 < k < 9", "50.0%", "40.0%"):
        assert piece in shown.getvalue()


def test_messages_are_shown_by_their_text() -> None:
    chosen = Selection([{"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]}])
    chosen.keep("all", [False])
    assert chosen.report().filters[0].examples[0].text == "be\nhi"


def test_an_empty_set() -> None:
    report = Selection([]).report()
    assert (report.rows, report.kept) == (0, 0)
    assert "Rows in" in curation_page(report).html()


def test_rows_are_written_without_a_second_copy_of_them(tmp_path: Path) -> None:
    """A column at a time and the lines some at a time; it was four times what the rows hold."""
    rows: list[dict[str, Any]] = [
        {"question": f"How many are {i}? {'é' * 600}", "solution": str(i), "level": i} for i in range(4000)
    ]
    selection = Selection(rows, shown="question")
    write_rows(tmp_path, Selection(rows[:1], shown="question"))  # what is imported and kept once
    tracemalloc.start()
    write_rows(tmp_path, selection)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * sum(len(row["question"].encode()) for row in rows)
    assert json.loads((tmp_path / "curated.jsonl").read_text().splitlines()[-1]) == rows[-1]
