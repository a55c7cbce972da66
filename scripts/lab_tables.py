"""The labs' tables into docs/labs.md, between the marks ``<!-- lab NAME: begin -->`` and ``<!-- lab NAME: end -->``,
and their figures into docs/images.

python scripts/lab_tables.py [RUNS]     of every lab that has RUNS/NAME/table.md (RUNS: runs/labs); other blocks stay
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- lab ([\w-]+): begin -->\n).*?(?=<!-- lab \2: end -->)", re.DOTALL)


def page_with(text: str, runs: Path) -> str:
    """``text`` with the table of each lab below ``runs`` in its block."""

    def block(found: re.Match[str]) -> str:
        table = runs / found[2] / "table.md"
        return f"{found[1]}{table.read_text(encoding='utf-8')}" if table.is_file() else found[0]

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    page, runs = ROOT / "docs" / "labs.md", Path(*sys.argv[1:2] or [ROOT / "runs" / "labs"])
    page.write_text(page_with(page.read_text(encoding="utf-8"), runs), encoding="utf-8")
    for figure in runs.glob("*/curves.png"):
        shutil.copy(figure, ROOT / "docs" / "images" / f"lab_{figure.parent.name}.png")
