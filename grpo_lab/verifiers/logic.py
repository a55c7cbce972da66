"""A checker of natural deduction for classical propositional logic (Gentzen's rules, Fitch's layout).

    1. p -> q [premise]              a line: number, | for each open assumption, formula, rule with the lines it needs
    2. q -> r [premise]
    3. | p [assume]                  opens a subproof, which holds under p
    4. | q [->e 1,3]
    5. | r [->e 2,4]
    6. p -> r [->i 3-5]              closes it; a-b names a subproof by its first and last line

Each rule with the lines m, n and subproofs a-b it needs, and what it derives (A … C: a subproof that derives C from A):

    copy n        A                   &i m,n   A & B            &e m    A, or B, of A & B
    vi m          A v B of either     ve m,a-b,c-d   C of A v B, A … C and B … C
    ->e m,n       B of A -> B and A   ->i a-b  A -> B of A … B
    ~e m,n        # of ~A and A       ~i a-b   ~A of A … #
    #e m          anything of #       ~~e m    A of ~~A          raa a-b   A of ~A … #

A line may use earlier lines and closed subproofs, but none from inside a subproof that is closed by now. The proof ends
with the goal under no assumption. The order of m and n does not matter.

Formulas: a letter but v; ``#`` or ⊥, which is false; ``~A`` or ¬, ``A & B`` or ∧, ``A v B`` or ∨, ``A -> B`` or →, from
the tightest binding on. A chain of one sign needs no brackets: ``(p & q) & r``, ``p -> (q -> r)``. A formula is a
tuple: ``("p",)``, ``("#",)``, ``("~", A)``, ``("&", A, B)``, ``("v", A, B)``, ``("->", A, B)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Formula = tuple[Any, ...]
MOST_CHARACTERS_OF_A_FORMULA, MOST_DEPTH = 300, 40
FALSE: Formula = ("#",)
_SPELLED_OPERATORS = {"∧": "&", "∨": "v", "¬": "~", "→": "->", "⊥": "#", "!": "~", "=>": "->", "⇒": "->", "∼": "~"}
_TOKEN = re.compile(r"\s*(->|=>|[∧∨¬→⊥⇒∼!&~#()a-z])")
_LEVELS = ("->", "v", "&")
MOST_LINES, MOST_CHARACTERS = 200, 1000
_LINE = re.compile(r"^\s*([0-9]{1,4})[.):]\s*((?:\|\s*)*)([^\[\]|]{1,400})\[\s*([^\[\]]{1,80})\]\s*$")
_RULE = re.compile(
    r"^(premise|assume|copy|&i|&e|vi|ve|->i|->e|~i|~e|#e|~~e|raa)((?:[\s,]+[0-9]{1,4}(?:-[0-9]{1,4})?)*)$"
)
_SPELLED = str.maketrans({"∧": "&", "∨": "v", "¬": "~", "⊥": "#"})


class NoFormula(ValueError):
    """Raised for a text that is no formula, or too large a one."""


def read(text: str) -> Formula:
    """Parse all of ``text`` as one formula. Raises ``NoFormula`` for any other text."""
    if len(text) > MOST_CHARACTERS_OF_A_FORMULA:
        raise NoFormula(f"longer than {MOST_CHARACTERS_OF_A_FORMULA} characters")
    tokens = []
    place = 0
    text = text.strip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise NoFormula(f"{text[place : place + 20]!r}")
        tokens.append(_SPELLED_OPERATORS.get(found[1], found[1]))
        place = found.end()
    formula, end = _level(tokens, 0, 0, 0)
    if end < len(tokens):
        raise NoFormula(f"{tokens[end]!r} is left over")
    return formula


def _level(tokens: list[str], place: int, level: int, depth: int) -> tuple[Formula, int]:
    """Parse from token ``place`` on a formula of the sign ``_LEVELS[level]`` and those that bind tighter. Return it and
    the place behind it. A chain of ``->`` groups to the right, the others to the left."""
    if level == len(_LEVELS):
        return _single(tokens, place, depth)
    left, place = _level(tokens, place, level + 1, depth)
    sign = _LEVELS[level]
    while place < len(tokens) and tokens[place] == sign:
        right, place = _level(tokens, place + 1, level if sign == "->" else level + 1, _deeper(depth))
        left = (sign, left, right)
        depth = _deeper(depth)
    return left, place


def _deeper(depth: int) -> int:
    """Return ``depth + 1``. Raises ``NoFormula`` above the limit."""
    if depth >= MOST_DEPTH:
        raise NoFormula(f"nested deeper than {MOST_DEPTH}")
    return depth + 1


def _single(tokens: list[str], place: int, depth: int) -> tuple[Formula, int]:
    """Parse from token ``place`` on a letter, ``#``, a negation or a formula in brackets. Return it and the place
    behind it."""
    token = ""
    if place < len(tokens):
        token = tokens[place]
    if token == "~":
        inside, place = _single(tokens, place + 1, _deeper(depth - 1) + 1)  # may nest one deeper than anything else
        return ("~", inside), place
    if token == "(":
        inside, place = _level(tokens, place + 1, 0, _deeper(depth))
        if place >= len(tokens) or tokens[place] != ")":
            raise NoFormula("a bracket is not closed")
        return inside, place + 1
    if token == "#" or (len(token) == 1 and token.isalpha() and token != "v"):
        return (token,), place + 1
    raise NoFormula(f"{token!r} where a formula is needed")


def write(formula: Formula) -> str:
    """Write a formula with brackets around every compound part, none around the whole."""
    if len(formula) == 1:
        return str(formula[0])
    parts = [f"({write(part)})" if len(part) == 3 else write(part) for part in formula[1:]]
    if formula[0] == "~":
        return f"~{parts[0]}"
    return f" {formula[0]} ".join(parts)


def atoms(formula: Formula) -> set[str]:
    """Return the letters of a formula."""
    if len(formula) == 1:
        if formula == FALSE:
            return set()
        return {formula[0]}
    return set().union(*(atoms(part) for part in formula[1:]))


class NotAProof(ValueError):
    """Raised for a text that is no proof of the sequent; the message says why, with the line."""


@dataclass
class _Part:
    """A subproof that is still open: an assumption and what was derived under it. The outermost part has no assumption.

    Attributes:
        first: number of the line with the assumption.
        lines: formula of each line, by its number.
        closed: subproofs inside it that are closed: (first, last line) → (assumption, last formula).
    """

    first: int
    lines: dict[int, Formula] = field(default_factory=dict)
    closed: dict[tuple[int, int], tuple[Formula, Formula]] = field(default_factory=dict)


def check(text: str, premises: Sequence[Formula], goal: Formula) -> None:
    """Raise ``NotAProof`` unless ``text`` proves ``goal`` from ``premises``."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not 0 < len(lines) <= MOST_LINES:
        raise NotAProof(f"{len(lines)} lines; 1 to {MOST_LINES} are read")
    proof = _Proof(premises)
    for number, line in enumerate(lines, start=1):
        try:
            proof.add(number, line)
        except (NotAProof, NoFormula) as error:
            raise NotAProof(f"line {number}: {error}") from None
    if len(proof.open) > 1 or proof.open[0].lines.get(len(lines)) != goal:
        raise NotAProof("the last line is not the goal under no assumption")


class _Proof:
    """A proof that is checked line by line; ``open`` holds the parts that are open, the outermost first."""

    def __init__(self, premises: Sequence[Formula]) -> None:
        self.premises = premises
        self.open = [_Part(0)]

    def add(self, number: int, line: str) -> None:
        """Check the line with this number, and add its formula. Raises ``NotAProof`` if it does not follow from what
        can be seen from it, and ``NoFormula`` if its formula cannot be parsed."""
        found = None
        if len(line) <= MOST_CHARACTERS:
            found = _LINE.match(line)
        rule = found and _RULE.match(found[4].replace("→", "->").translate(_SPELLED).strip())
        if not found or not rule or int(found[1]) != number:
            raise NotAProof(f"not of the form `{number}. formula [rule lines]`")
        depth = found[2].count("|")
        formula = read(found[3])
        opens = rule[1] == "assume"
        still_open = depth - opens  # subproofs that were open before and are not closed by this line
        if not 0 <= still_open < len(self.open):
            raise NotAProof("a | without an assumption")
        while len(self.open) - 1 > still_open:
            part = self.open.pop()
            last = max(part.lines)
            self.open[-1].closed[part.first, last] = part.lines[part.first], part.lines[last]
        if opens:
            self.open.append(_Part(number))
        if rule[1] == "premise":
            if depth or formula not in self.premises:
                raise NotAProof("no premise")
        elif not opens:
            self._derive(formula, rule[1], re.findall(r"[0-9]+(?:-[0-9]+)?", rule[2]))
        elif rule[2].strip():
            raise NotAProof("an assumption rests on nothing")
        self.open[-1].lines[number] = formula

    def _derive(self, formula: Formula, rule: str, places: list[str]) -> None:
        """Raise ``NotAProof`` unless ``formula`` follows by ``rule`` from the lines and subproofs at ``places``."""
        lines = [self._line(int(place)) for place in places if "-" not in place]
        parts = [self._part(place) for place in places if "-" in place]
        wanted_lines, wanted_parts, follows = _RULES[rule]
        if (len(lines), len(parts)) != (wanted_lines, wanted_parts):
            raise NotAProof(f"{rule} rests on {wanted_lines} lines and {wanted_parts} parts")
        if not (follows(formula, lines, parts) or follows(formula, lines[::-1], parts[::-1])):
            raise NotAProof(f"does not follow by {rule}")

    def _line(self, number: int) -> Formula:
        """Return the formula of an earlier line that is in no closed subproof."""
        for part in self.open:
            if number in part.lines:
                return part.lines[number]
        raise NotAProof(f"line {number} cannot be seen from here")

    def _part(self, place: str) -> tuple[Formula, Formula]:
        """Return (assumption, last formula) of the closed subproof ``a-b``."""
        first, last = map(int, place.split("-"))
        for part in self.open:
            if (first, last) in part.closed:
                return part.closed[first, last]
        raise NotAProof(f"no part {place} can be seen from here")


_Follows = Callable[[Formula, list[Formula], list[tuple[Formula, Formula]]], bool]


_RULES: dict[str, tuple[int, int, _Follows]] = {
    "copy": (1, 0, lambda a, x, _: a == x[0]),
    "&i": (2, 0, lambda a, x, _: a == ("&", x[0], x[1])),
    "&e": (1, 0, lambda a, x, _: x[0][0] == "&" and a in x[0][1:]),
    "vi": (1, 0, lambda a, x, _: a[0] == "v" and x[0] in a[1:]),
    "ve": (1, 2, lambda a, x, s: x[0] == ("v", s[0][0], s[1][0]) and s[0][1] == s[1][1] == a),
    "->i": (0, 1, lambda a, _, s: a == ("->", *s[0])),
    "->e": (2, 0, lambda a, x, _: x[0] == ("->", x[1], a)),
    "~i": (0, 1, lambda a, _, s: a == ("~", s[0][0]) and s[0][1] == FALSE),
    "~e": (2, 0, lambda a, x, _: a == FALSE and x[0] == ("~", x[1])),
    "#e": (1, 0, lambda a, x, _: x[0] == FALSE),
    "~~e": (1, 0, lambda a, x, _: x[0] == ("~", ("~", a))),
    "raa": (0, 1, lambda a, _, s: s[0] == (("~", a), FALSE)),
}
"""Rule → number of lines and of subproofs that it needs, and whether the formula follows from them in this order: a
function of the formula, the lines' formulas, and each subproof's (assumption, last formula)."""
