"""The file index, docs/files.md, made from the first sentence of every module of grpo_lab.

python scripts/file_index.py            write it between its two marks
python scripts/file_index.py --check    exit 1 where it is not what the modules say
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
MARKS = ("<!-- file index: make docs-index -->", "<!-- end of the file index -->")


#: words of a first sentence that has to be read in an index; a longer one goes up to its colon or semicolon
MOST = 12


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring, in a line."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = said.partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    sentence = re.split(r"(?<=[.?!]) (?=[A-Z`])", line, maxsplit=1)[0]
    if len(sentence.split()) <= MOST:
        return sentence
    short = re.split(r"[;:] ", sentence, maxsplit=1)[0].rstrip(".")
    whole = short.count("`") % 2 == 0 and short.count("(") == short.count(")")
    return f"{short}." if whole and len(short.split()) > 4 else sentence


def index(package: Path) -> str:
    """A list a room: file, what it says of itself. A room's ``__init__`` is its heading."""
    lines: list[str] = []
    rooms = sorted({path.parent for path in package.rglob("*.py")})
    for room in rooms:
        name = room.relative_to(package.parent).as_posix()
        lines.append(f"## `{name}/`")
        said = first_line(room / "__init__.py")
        if said:
            lines += [said, ""]
        files = [path for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
        rows = [f"- `{path.name}`: {first_line(path)}" for path in files]
        if rows:
            lines += [*rows, ""]
    return "\n".join(lines)


def page_with(text: str, made: str) -> str:
    """``text`` with ``made`` between the marks."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{made}\n{MARKS[1]}{after}"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    made = page_with(text, index(ROOT / "grpo_lab"))
    if "--check" in sys.argv:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
