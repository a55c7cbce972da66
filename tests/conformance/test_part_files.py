"""A part is one file that a reader holds: at most 60 lines beside docstrings, comments and blank lines."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_lab"
MOST_LINES_OF_CODE = 60
NO_PARTS = {
    "advantages/__init__.py": "the table of rules, and what the room offers",
    "objectives/objective.py": "what all parts are put into",
    "objectives/mixed.py": "an objective for each task, put together",
    "objectives/presets.py": "the table of objectives",
}
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Lines that hold something else than a docstring or a comment; imports count."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in BLANK:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            held -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def test_a_part_has_at_most_sixty_lines() -> None:
    files = [path for room in ("advantages", "objectives") for path in (PACKAGE / room).rglob("*.py")]
    found = {path.relative_to(PACKAGE).as_posix(): lines_of_code(path.read_text(encoding="utf-8")) for path in files}
    assert {name for name, lines in found.items() if lines > MOST_LINES_OF_CODE} == NO_PARTS.keys()
    assert lines_of_code('"""Says.\n\nMore.\n"""\n# why\nx = """a\nb"""\n') == 2
