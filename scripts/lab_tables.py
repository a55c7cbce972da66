"""The labs' tables into docs/labs.md, between the marks ``<!-- lab NAME: begin -->`` and ``<!-- lab NAME: end -->``.

python scripts/lab_tables.py            of every lab that has runs/labs/NAME/table.md; other blocks stay as they are
"""

from __future__ import annotations

import re
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
    page = ROOT / "docs" / "labs.md"
    page.write_text(page_with(page.read_text(encoding="utf-8"), ROOT / "runs" / "labs"), encoding="utf-8")
