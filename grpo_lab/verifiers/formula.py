"""Formulas of propositional logic: read, and written in one form.

    atom   a single letter a … z but v          ~A  ¬A  not          A & B  ∧  and
    #  ⊥   the false one                        A v B  ∨  or         A -> B  →  implies, to the right

``~`` binds closest, then ``&``, ``v``, ``->``. A chain of one sign may stand without brackets; the reading is ``(p & q) & r`` and
``p -> (q -> r)``. A formula is a tuple: ``("p",)``, ``("#",)``, ``("~", A)``, ``("&", A, B)``, ``("v", A, B)``, ``("->", A, B)``.
"""

from __future__ import annotations

import re
from typing import Any

Formula = tuple[Any, ...]
MOST_CHARACTERS, MOST_DEPTH = 300, 40
FALSE: Formula = ("#",)
_SPELLED = {"∧": "&", "∨": "v", "¬": "~", "→": "->", "⊥": "#", "!": "~", "=>": "->", "⇒": "->", "∼": "~"}
_TOKEN = re.compile(r"\s*(->|=>|[∧∨¬→⊥⇒∼!&~#()a-z])")
_LEVELS = ("->", "v", "&")


class NoFormula(ValueError):
    """The text is no formula, or one too large."""


def read(text: str) -> Formula:
    """The formula that all of ``text`` is."""
    if len(text) > MOST_CHARACTERS:
        raise NoFormula(f"longer than {MOST_CHARACTERS} characters")
    tokens, place = [], 0
    text = text.strip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise NoFormula(f"{text[place : place + 20]!r}")
        tokens.append(_SPELLED.get(found[1], found[1]))
        place = found.end()
    formula, end = _level(tokens, 0, 0, 0)
    if end < len(tokens):
        raise NoFormula(f"{tokens[end]!r} is left over")
    return formula


def _level(tokens: list[str], place: int, level: int, depth: int) -> tuple[Formula, int]:
    if depth > MOST_DEPTH:
        raise NoFormula(f"nested deeper than {MOST_DEPTH}")
    if level == len(_LEVELS):
        return _single(tokens, place, depth)
    left, place = _level(tokens, place, level + 1, depth)
    sign = _LEVELS[level]
    while place < len(tokens) and tokens[place] == sign:
        right, place = _level(tokens, place + 1, level if sign == "->" else level + 1, depth + 1)
        left = (sign, left, right)
        depth += 1
        if depth > MOST_DEPTH:
            raise NoFormula(f"nested deeper than {MOST_DEPTH}")
    return left, place


def _single(tokens: list[str], place: int, depth: int) -> tuple[Formula, int]:
    token = tokens[place] if place < len(tokens) else ""
    if token == "~":
        if depth > MOST_DEPTH:
            raise NoFormula(f"nested deeper than {MOST_DEPTH}")
        inside, place = _single(tokens, place + 1, depth + 1)
        return ("~", inside), place
    if token == "(":
        inside, place = _level(tokens, place + 1, 0, depth + 1)
        if place >= len(tokens) or tokens[place] != ")":
            raise NoFormula("a bracket is not closed")
        return inside, place + 1
    if token == "#" or (len(token) == 1 and token.isalpha() and token != "v"):
        return (token,), place + 1
    raise NoFormula(f"{token!r} where a formula is needed")


def write(formula: Formula) -> str:
    """With brackets around every compound part, none around the whole."""
    if len(formula) == 1:
        return str(formula[0])
    if formula[0] == "~":
        return f"~{_part(formula[1])}"
    return f"{_part(formula[1])} {formula[0]} {_part(formula[2])}"


def _part(formula: Formula) -> str:
    return f"({write(formula)})" if len(formula) == 3 else write(formula)


def atoms(formula: Formula) -> set[str]:
    if len(formula) == 1:
        return set() if formula == FALSE else {formula[0]}
    return set().union(*(atoms(part) for part in formula[1:]))


__all__ = ["FALSE", "Formula", "NoFormula", "atoms", "read", "write"]
