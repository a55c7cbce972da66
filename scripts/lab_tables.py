"""Copy the measured tables of labs into the pages that show them.

    python scripts/lab_tables.py [RUNS]     # RUNS: the folder of the labs' results, runs/labs by default

For every lab NAME with a file RUNS/NAME/table.md,

- the table goes between the marks ``<!-- lab NAME: begin -->`` and ``<!-- lab NAME: end -->`` in docs/labs/,
  docs/algorithms/ and the sorting lab's page,
- its figure goes into docs/images,
- a line goes into docs/measured.md,
- and what each of its runs ended with goes into docs/labs_records.json.

What the pages show of other labs stays as it is.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *(f"{room}/{page.name}" for room in ("labs", "algorithms") for page in sorted((ROOT / "docs" / room).glob("*.md"))),
    "../recipes/lab/sorting/README.md",
)
"""The pages that show tables, as paths from docs/."""
MEASURED, RECORDS = ROOT / "docs" / "measured.md", ROOT / "docs" / "labs_records.json"
KEPT = ("seed", "before", "after", "process_seconds")
BLOCK = re.compile(r"(<!-- lab ([\w/-]+): begin -->\n)(.*?)(?=<!-- lab \2: end -->)", re.DOTALL)
LINES = re.compile(r"(<!-- labs: begin -->\n).*?(?=<!-- labs: end -->)", re.DOTALL)
SAID = {
    "overoptimisation": "truth",
    "court": "4 old: pass@1; pass@16; collapses",
    "capability": "depth 4: pass@1; pass@128",
    "capability_bases": "depth 4: pass@1; pass@128",
    "capability_losses": "depth 4: pass@1; pass@128",
}
"""Lab → the column of its table that docs/measured.md shows, if it is not the first behind arm and seeds."""
SEEDS = re.compile(r" \([\d., -]+\)$")
"""The values of single seeds at the end of a cell, or of a difference between arms."""


def pages() -> dict[str, str]:
    """Return page (a path from docs/) → its text."""
    return {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES}


def page_with(text: str, runs: Path) -> str:
    """Return the page ``text`` with each table that exists in ``runs`` put into its block."""

    def block(found: re.Match[str]) -> str:
        table = runs / found[2] / "table.md"
        return found[1] + seeds_once(found[2], table.read_text(encoding="utf-8")) if table.is_file() else found[0]

    return BLOCK.sub(block, text)


#: the second table of a lab, which its figure draws: columns at the tokens that the thriftiest arm generated
AT_EQUAL_TOKENS = re.compile(r"\nAfter [\d.,]+ k generated tokens:\n\n(?:\|.*\n)+")


def column_said(name: str, heads: list[str]) -> int:
    """Return the index of the column of a lab's table that holds its main result."""
    return heads.index(SAID.get(name, heads[2]))


def seeds_once(name: str, text: str) -> str:
    """Return the table of the lab ``name`` as a page shows it: values of single seeds stand in the main column only
    (the others are in docs/labs_records.json), and the table at equal tokens is left out, since the figure shows it."""
    main_column: int | None = None
    lines = []
    for number, line in enumerate(AT_EQUAL_TOKENS.sub("", text).splitlines()):
        if line.startswith("|"):
            cells = line.strip("| ").split(" | ")
            if number == 0 and len(cells) > 2:
                main_column = column_said(name, cells)
            shown = [cell if at == main_column else SEEDS.sub("", cell) for at, cell in enumerate(cells)]
            line = f"| {' | '.join(shown)} |"
        else:
            main_column = None
            line = SEEDS.sub("", line)
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def minutes(runs_of: dict[str, list[dict[str, Any]]]) -> str:
    """Return the minutes that all runs of a lab took one after another, as text; – if a run's time is unknown."""
    seconds = [run["process_seconds"] for runs in runs_of.values() for run in runs]
    return f"{sum(seconds) / 60:.0f}" if seconds and None not in seconds else "–"


def measured_with(text: str, shown: dict[str, str], kept: dict[str, Any]) -> str:
    """Return the page docs/measured.md, ``text``, with a line for each lab: its main result and its minutes.

    Args:
        text: the page as it is.
        shown: page → its text, with the labs' tables.
        kept: the labs' records, for the minutes.
    """
    lines = ["| lab | what | by arm, mean ± 95% interval over seeds | minutes |", "|---|---|---|---|"]
    for page, name, block in ((page, *found[1:]) for page, text in shown.items() for found in BLOCK.findall(text)):
        rows = [line.strip("| ").split(" | ") for line in block.split("\n\n")[0].splitlines()]
        if len(rows) > 2:
            at = column_said(name, rows[0])
            values = in_short([(row[0], row[at].partition(" (")[0]) for row in rows[2:]])
            what = f"{rows[0][at]}, {rows[-1][1]} seeds"
            took = minutes(kept.get(name, {}))
            lines.append(f"| [{name}]({page}) | {what} | {'; '.join(values)} | {took} |")
    return LINES.sub(lambda found: found[1] + "\n".join(lines) + "\n", text)


def in_short(values: list[tuple[str, str]]) -> list[str]:
    """Return in words the value at the start, if arms share it, and the arms with the lowest and the highest value."""
    arms = [pair for pair in values if not pair[0].startswith("(start")]
    ends = sorted(arms, key=lambda pair: float(pair[1].split()[0].rstrip(";")))
    start = [f"{arm} {value}" for arm, value in values if arm == "(start)"]
    if len(arms) == 1:
        return [*start, " ".join(ends[0])]
    return [*start, f"{len(arms)} arms, from {' '.join(ends[0])} to {' '.join(ends[-1])}"]


def records_with(kept: dict[str, Any], runs: Path, shown: set[str]) -> dict[str, Any]:
    """Return the records ``kept`` (lab → arm → its runs, without curves), with those of each lab in ``runs`` that a
    page shows (``shown``) in place of its earlier ones."""
    for file in sorted(file for file in runs.glob("*/records.json") if file.parent.name in shown):
        found = json.loads(file.read_text(encoding="utf-8"))
        kept[file.parent.name] = {
            arm: [{name: run.get(name) for name in KEPT} for run in of_arm] for arm, of_arm in found.items()
        }
    return kept


def main(runs: Path) -> None:
    """Update pages, figures and records from the folder ``runs``."""
    for page, text in pages().items():
        (ROOT / "docs" / page).write_text(page_with(text, runs), encoding="utf-8")
        for _, name, _ in BLOCK.findall(text):
            if (figure := runs / name / "curves.png").is_file():
                shutil.copy(figure, ROOT / "docs" / "images" / f"lab_{name.replace('/', '_')}.png")
    shown = {name for text in pages().values() for _, name, _ in BLOCK.findall(text)}
    records = records_with(json.loads(RECORDS.read_text(encoding="utf-8")), runs, shown)
    RECORDS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    MEASURED.write_text(measured_with(MEASURED.read_text(encoding="utf-8"), pages(), records), encoding="utf-8")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or [ROOT / "runs" / "labs"]))
