"""Make the file index, docs/files.md, from the docstrings of all modules of grpo_lab.

    python scripts/file_index.py            # writes the index between its two marks
    python scripts/file_index.py --check    # exits with 1 if the page is not what the modules say

A file's line is the first sentence of its module's docstring, or the first clause of a long one.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
MARKS = ("<!-- file index: make docs-index -->", "<!-- end of the file index -->")


#: number of words up to which a first sentence stands whole in the index; a longer one is cut behind its first clause
MOST = 9
#: where a clause begins that only adds to what stands before it, and is left out
MORE = re.compile(
    r"; | \((?!`)|, (?:which|whose|where|wherever|as|so|by|in|on|for|from|made|set|after|until|before|during|since)\b"
    r"|, (?:how|if|or|each|but|charged|judged|described|ready|wait)\b"
)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, in one line."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = said.partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    return re.split(r"(?<=[.?!]) (?=[A-Z`])", line, maxsplit=1)[0]


def first_clause(path: Path) -> str:
    """Return the first sentence of a module's docstring, without the clauses behind the first if it is long."""
    sentence = first_sentence(path)
    if len(sentence.split()) <= MOST:
        return sentence
    subject, colon, _ = sentence.partition(": ")
    if colon and len(subject.split()) > 2 and _whole(subject):
        return f"{subject}."
    pair = sentence.split(", and ")
    if len(pair) == 2 and "," not in pair[0]:
        return f"{pair[0]}."
    for more in MORE.finditer(sentence):
        short = sentence[: more.start()]
        if _whole(short) and len(short.split()) > 3:
            return f"{short}."
    return sentence


def _whole(text: str) -> bool:
    """Return whether every bracket and every backtick in ``text`` is closed."""
    return text.count("`") % 2 == 0 and all(text.count(a) == text.count(b) for a, b in ("()", "{}"))


def index(package: Path) -> str:
    """Return the index as Markdown: a list for each room, with a line for each file. The docstring of a room's
    ``__init__`` stands above its list."""
    lines: list[str] = []
    rooms = sorted({path.parent for path in package.rglob("*.py")})
    for room in rooms:
        name = room.relative_to(package.parent).as_posix()
        lines.append(f"## `{name}/`")
        said = first_sentence(room / "__init__.py")
        if said:
            lines += [said, ""]
        files = [path for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
        rows = [f"- `{path.name}`: {first_clause(path)}" for path in files]
        if rows:
            lines += [*rows, ""]
    return "\n".join(lines)


def page_with(text: str, made: str) -> str:
    """Return the page ``text`` with ``made`` between its marks."""
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
