"""Records of the speedrun (``speedrun.py``), and the table that docs/speedrun.md shows of them.

A record is one entry on one number of cores, with a run for each seed. Its time is that of the slower run. Not a
command: ``speedrun.py --table`` writes the table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lab.labs.tables import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORDS = DOCS / "speedrun_records.json"
PAGE = DOCS / "speedrun.md"
CORES = 2
"""Number of cores on which entries are compared."""
BLOCK = re.compile(r"(<!-- speedrun: begin -->\n).*?(?=<!-- speedrun: end -->)", re.DOTALL)
HEADS = (
    "entry", "seconds, two cores", "cold start", "RL", "RL steps", "CPU seconds", "accuracy (lower end)",
    "imports; set-up; evaluations", "load", "seconds, one core", "commit",
)  # fmt: skip
Record = dict[str, Any]


def entered(records: Sequence[Record], found: Record) -> list[Record]:
    """Return the records with ``found`` added, in place of an earlier record of the same entry and number of cores."""
    others = [one for one in records if place(one) != place(found)]
    return sorted([*others, found], key=lambda one: (one["cores"], slower(one)))


def place(record: Record) -> tuple[str, int]:
    """Return a record's entry and number of cores; no two records have the same."""
    return record["entry"], record["cores"]


def slower(record: Record) -> float:
    """Return the seconds of training of the slower run."""
    return max(float(one["training"]["wall"]) for one in record["runs"])


def table(records: Sequence[Record]) -> str:
    """Return a table with a row for each entry, the fastest on two cores first, and below it the entries' commands. A
    cell shows the entry's runs in the order of their seeds."""
    by_place = {place(one): one for one in records}
    on_two = sorted((one for one in records if one["cores"] == CORES), key=slower)
    if not on_two:
        return "No record yet.\n"
    rows = [
        [*cells(one), of_runs(by_place.get((one["entry"], 1)), "training", "wall"), one["commit"]] for one in on_two
    ]
    commands = "\n".join(f"- {one['entry']}: `python scripts/speedrun.py {one['command']}`" for one in on_two)
    machines = ", ".join(sorted({f"{one['machine']}, {one['date']}" for one in records}))
    return f"{markdown(HEADS, rows)}\n\n{machines}.\n\n{commands}\n"


def cells(record: Record) -> list[str]:
    """Return an entry's cells of the table, without the last two: seconds on one core, and commit."""
    runs = record["runs"]
    besides = (f"{record['imports']:.1f}", of_runs(record, "set_up", "wall"), of_runs(record, "evaluations", "wall"))
    return [
        record["entry"],
        f"**{slower(record):.1f}** ({of_runs(record, 'training', 'wall')})",
        of_runs(record, "cold_start", "wall"),
        of_runs(record, "reinforcement", "wall"),
        ", ".join(str(one["steps"]) for one in runs),
        of_runs(record, "training", "cpu"),
        ", ".join(f"{one['accuracy']:.3f} ({one['low']:.3f})" for one in runs),
        "; ".join(besides),
        f"{record['load']:.2f}",
    ]


def of_runs(record: Record | None, part: str, kind: str) -> str:
    """Return the seconds of each run of a record, as text; – if there is no record. ``part``: which seconds, such as
    ``training``; ``kind``: ``wall`` or ``cpu``."""
    if record is None:
        return "–"
    return ", ".join(f"{one[part][kind]:.1f}" for one in record["runs"])


def page_with(text: str, records: Sequence[Record]) -> str:
    """Return ``text`` with the table between its marks."""
    return BLOCK.sub(lambda found: found[1] + table(records), text)
