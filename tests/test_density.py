"""How densely the package is written: packed assignments and conditional expressions are few.

Counted as ``../shared/house_measures.py`` does: an assignment is packed where a tuple of values fills a tuple of
targets (``a, b = f(x), g(y)``); a line of code is one that is neither empty, a comment, an import nor a docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "grpo_lab"
MOST_PACKED = 3.0
"""Percent of all assignments."""
MOST_CONDITIONAL = 25.0
"""Conditional expressions in 1,000 lines of code."""


@dataclass(frozen=True)
class Density:
    """What stands in some sources."""

    assignments: int
    packed: int
    conditional: int
    lines: int

    @classmethod
    def of(cls, sources: Iterable[str]) -> Density:
        assignments = 0
        packed = 0
        conditional = 0
        lines = 0
        for source in sources:
            nodes = list(ast.walk(ast.parse(source)))
            assignments += sum(isinstance(node, ast.Assign | ast.AnnAssign) for node in nodes)
            packed += sum(is_packed(node) for node in nodes)
            conditional += sum(isinstance(node, ast.IfExp) for node in nodes)
            lines += lines_of_code(source, nodes)
        return cls(assignments, packed, conditional, lines)

    @property
    def percent_packed(self) -> float:
        return 100 * self.packed / self.assignments

    @property
    def conditional_per_thousand(self) -> float:
        return 1000 * self.conditional / self.lines


def is_packed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def lines_of_code(source: str, nodes: Iterable[ast.AST]) -> int:
    stripped = [line.strip() for line in source.splitlines()]
    code = [line for line in stripped if line and not line.startswith(("#", "import ", "from "))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [node.body[0] for node in nodes if isinstance(node, documented) and ast.get_docstring(node)]
    return len(code) - sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in docstrings)


def test_the_package_is_written_one_thought_a_line() -> None:
    found = Density.of(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert found.percent_packed <= MOST_PACKED
    assert found.conditional_per_thousand <= MOST_CONDITIONAL


PLANTED = '''"""A docstring, which is no code."""

import os
# a comment
def f(x, y):
    """Another."""
    a, b = len(x), len(y)
    low, (high, _) = (a, b), (b, a)
    first, second = divmod(a, b)
    total: int = a if a > b else b
    return total if x else (1 if y else 0)
'''


def test_a_planted_dense_one_is_seen() -> None:
    found = Density.of([PLANTED])
    assert found == Density(assignments=4, packed=2, conditional=3, lines=6)
    assert found.percent_packed == 50.0
    assert found.conditional_per_thousand == 500.0
    assert found.percent_packed > MOST_PACKED
    assert found.conditional_per_thousand > MOST_CONDITIONAL
