"""The labs' tables into docs/labs.md, between the marks ``<!-- lab NAME: begin -->`` and ``<!-- lab NAME: end -->``,
their figures into docs/images, a line of each into docs/measured.md, and what each run ended with into
docs/labs_records.json.

python scripts/lab_tables.py [RUNS]     of every lab that has RUNS/NAME/table.md (RUNS: runs/labs); other blocks stay
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, MEASURED = ROOT / "docs" / "labs.md", ROOT / "docs" / "measured.md"
RECORDS = ROOT / "docs" / "labs_records.json"
KEPT = ("seed", "before", "after", "process_seconds")
BLOCK = re.compile(r"(<!-- lab ([\w-]+): begin -->\n)(.*?)(?=<!-- lab \2: end -->)", re.DOTALL)
LINES = re.compile(r"(<!-- labs: begin -->\n).*?(?=<!-- labs: end -->)", re.DOTALL)
SAID = {"overoptimisation": "truth"}
"""Lab → the column of its table that docs/measured.md shows, where that is not the first."""


def page_with(text: str, runs: Path) -> str:
    """``text`` with the table of each lab below ``runs`` in its block."""

    def block(found: re.Match[str]) -> str:
        table = runs / found[2] / "table.md"
        return f"{found[1]}{table.read_text(encoding='utf-8')}" if table.is_file() else found[0]

    return BLOCK.sub(block, text)


def measured_with(text: str, page: str) -> str:
    """``text`` with a line for each lab of ``page``, docs/labs.md: one column of its table, without single seeds."""
    lines = ["| lab | what | by arm, mean ± 95% interval over seeds |", "|---|---|---|"]
    for _, name, block in BLOCK.findall(page):
        rows = [line.strip("| ").split(" | ") for line in block.split("\n\n")[0].splitlines()]
        if len(rows) > 2:
            at = rows[0].index(SAID.get(name, rows[0][2]))
            shown = [f"{row[0]} {row[at].partition(' (')[0]}" for row in rows[2:]]
            lines.append(f"| [{name}](labs.md) | {rows[0][at]}, {rows[-1][1]} seeds | {'; '.join(shown)} |")
    return LINES.sub(lambda found: found[1] + "\n".join(lines) + "\n", text)


def records_with(kept: dict[str, Any], runs: Path) -> dict[str, Any]:
    """``kept`` (lab → arm → its runs, without curves) with those of each lab below ``runs``."""
    for file in sorted(runs.glob("*/records.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        kept[file.parent.name] = {
            arm: [{name: run.get(name) for name in KEPT} for run in of_arm] for arm, of_arm in found.items()
        }
    return kept


if __name__ == "__main__":
    runs = Path(*sys.argv[1:2] or [ROOT / "runs" / "labs"])
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    records = records_with(json.loads(RECORDS.read_text(encoding="utf-8")), runs)
    RECORDS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for figure in runs.glob("*/curves.png"):
        shutil.copy(figure, ROOT / "docs" / "images" / f"lab_{figure.parent.name}.png")
    measured = measured_with(MEASURED.read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8"))
    MEASURED.write_text(measured, encoding="utf-8")
