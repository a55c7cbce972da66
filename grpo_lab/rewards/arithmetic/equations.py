r"""Written arithmetic judged by exact fractions: which equations a text states, and whether they hold.

    "4 * $10.00 = $40.00. That makes 40 + 3 = 44."   -> holds, does not
    "A = (2 + 3) = 5, B = 4. Then A * B = 5 * 4 = 21" -> 2 + 3 = 5 holds, 5 * 4 = 21 does not

A chain a = b = c is judged link by link. Names (a capital letter that stands alone) are what the text last set them to. What cannot be read as arithmetic on both sides of the sign (units, words, unknowns) is not judged: a checker that guesses
would pay for confusing it. Nothing is ever handed to ``eval``; size and depth are bounded, so a hostile text costs its length.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from grpo_lab.rewards.arithmetic.writing import ABOUT, plain

#: longest side of an equation that is read, in characters, and deepest nesting
MAX_SIDE, MAX_DEPTH, MAX_EXPONENT, MAX_BITS = 400, 60, 64, 2048

#: GSM8K's calculator: ``3 * 4 = <<3*4=12>>12``
_CALCULATOR = re.compile(r"<<([^<>]{1,200})>>")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<name>(?<![A-Za-z])[A-Z](?![A-Za-z]))|(?P<sign>[-+*/^()\[\]{}]))"
)
_SIGN_OF_EQUALITY = re.compile(r"(?<![<>!=:])=(?!=)")
_BREAK = re.compile(
    r"[;\n]|\((?=[a-z]{2})|[.!?,:](?=\s|$)|\b(?:and|so|then|where|which|because|since|therefore)\b", re.IGNORECASE
)
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Equation:
    """One link of a chain as it was written, and whether it holds."""

    left: str
    right: str
    holds: bool


class NotArithmetic(ValueError):
    """A text that is no arithmetic, or too large to be read."""


def judged(text: str, names: dict[str, Fraction] | None = None) -> list[Equation]:
    """The equations of ``text`` that can be judged, in their order.

    Args:
        names: what names stand for so far; what the text sets is written into it, for the steps that follow.
    """
    known = {} if names is None else names
    found: list[Equation] = []
    for sides in _chains(text):
        found += _judge_chain(sides, known)
    return found


def value_of(expression: str, names: dict[str, Fraction] | None = None) -> Fraction:
    """The exact value of ``1 + 2*(3 - 4)/5^2``. Raises ``NotArithmetic``."""
    reader = _Reader(expression, names or {})
    value = reader.sum(0)
    if reader.token is not None:
        raise NotArithmetic(f"{expression[:40]!r} goes on after an expression")
    return value


def _chains(text: str) -> Iterator[list[str]]:
    calculations = "".join(f"{inside}\n" for inside in _CALCULATOR.findall(text))
    text = calculations + _CALCULATOR.sub(" ", text)
    for sentence in _BREAK.split(plain(text)):
        if sentence is not None and "=" in sentence:
            sides = _SIGN_OF_EQUALITY.split(sentence)
            if len(sides) > 1:
                yield [side if len(side) <= MAX_SIDE else "?" for side in sides]


def _judge_chain(sides: list[str], known: dict[str, Fraction]) -> list[Equation]:
    found: list[Equation] = []
    name: str | None = None
    for place, (before, after) in enumerate(itertools.pairwise(sides)):
        about, after = after.lstrip().startswith(ABOUT), after.lstrip().removeprefix(ABOUT)
        left, right = _piece(before, at_its_end=True), _piece(after, at_its_end=False)
        starts = place == 0 or any(kind == "word" for *_, kind in _tokens(before))
        if starts:
            name = left if left is not None and re.fullmatch(r"[A-Z]", left) else None
        sets = starts and name is not None
        values = None if left is None or sets else _value(left, known), None if right is None else _value(right, known)
        counted = place == 0 and left is not None and right is not None and _counts(before, left, right)
        if left is not None and right is not None and values[0] is not None and values[1] is not None and not counted:
            same = _about if about else _same
            found.append(Equation(left, right, same(values[0], values[1], right)))
        if name is not None and values[1] is not None:
            known[name] = values[1]
    return found


def _value(piece: str, known: dict[str, Fraction]) -> Fraction | None:
    try:
        return value_of(piece, known)
    except NotArithmetic:
        return None


def _same(left: Fraction, right: Fraction, written: str) -> bool:
    """Equal, or equal when rounded as the right side was written (``2/3 = 0.67``); whole numbers are not rounded.

    ``18 / 450 * 100 = 4%`` is meant as it is written: a bare percentage is its number, too.
    """
    if left == right or (re.fullmatch(r"\s*\(\d*\.?\d+/100\)\s*", written) and left == 100 * right):
        return True
    decimals = re.fullmatch(r"[\s(\[{-]*\d*\.(\d+)[\s)\]}]*", written)
    return decimals is not None and abs(left - right) <= Fraction(1, 2 * 10 ** len(decimals[1]))


def _about(left: Fraction, right: Fraction, written: str) -> bool:
    """``≈``: off by less than one of the last digit written that counts (``10/3 ≈ 3.33``, ``≈ 4``, ``1,234 ≈ 1,200``)."""
    digits = re.fullmatch(r"[\s(\[{+-]*(\d*)\.?(\d*)(/100)?[\s)\]}]*", written)
    if digits is None:
        return left == right
    whole, decimals, percent = digits.groups()
    unit = Fraction(1, 10 ** len(decimals)) if decimals else Fraction(10 ** (len(whole) - len(whole.rstrip("0"))))
    return abs(left - right) < unit / (100 if percent else 1)


def _counts(before: str, left: str, right: str) -> bool:
    """Whether a lone number behind words is set to another (``4 boxes with 6 = 24``): something was counted that is not written."""
    lone = re.compile(r"[\s(+-]*\d*\.?\d+[\s)]*")
    said = any(kind == "word" for *_, kind in _tokens(before))
    return said and lone.fullmatch(left) is not None and lone.fullmatch(right) is not None


def _piece(side: str, at_its_end: bool) -> str | None:
    """The arithmetic that touches the sign of equality behind (or before) ``side``; None where words are part of the sum."""
    runs: list[list[tuple[int, int]]] = [[]]
    for start, end, kind in _tokens(side):
        if kind == "word":
            runs.append([])
        else:
            runs[-1].append((start, end))
    run = runs[-1] if at_its_end else runs[0]
    if not run or (len(runs) > 1 and _cut_in_a_sum(side, run, runs, at_its_end)):
        return None
    return _balanced(side[run[0][0] : run[-1][1]], at_its_end)


def _cut_in_a_sum(side: str, run: list[tuple[int, int]], runs: list[list[tuple[int, int]]], first: bool) -> bool:
    """Whether an operator or no space at all ties the piece to a word (``5 apples + 3``, ``4x - 8``): alone it says something else."""
    if first:
        if side[: run[0][0]] and not (side[run[0][0] - 1].isspace() or side[run[0][0] - 1] in "\"'`*_~:.,"):
            return True
        head = side[run[0][0] : run[0][1]].strip()
        spaced = side[run[0][1] : run[0][1] + 1].isspace()
        before = next((other for other in reversed(runs[:-1]) if other), None)
        ties = before is not None and side[before[-1][0] : before[-1][1]].strip() in "+-*/^"
        return head in "+*/^" or (head == "-" and spaced) or ties
    if re.match(r"[a-z](?![a-zA-Z])", side[run[-1][1] :]):
        return True
    tail = side[run[-1][0] : run[-1][1]].strip()
    after = next((other for other in runs[1:] if other), None)
    return tail in "+-*/^" or (after is not None and side[after[0][0] : after[0][1]].strip() in "+-*/^")


def _tokens(side: str) -> Iterator[tuple[int, int, str]]:
    place = 0
    while place < len(side):
        match = _TOKEN.match(side, place)
        if match and match.end() > place:
            yield match.start() + len(match[0]) - len(match[0].lstrip()), match.end(), str(match.lastgroup)
            place = match.end()
        elif side[place].isspace() or side[place] in "\"'`*_~":
            place += 1
        else:
            start = place
            while place < len(side) and not side[place].isspace() and not _TOKEN.match(side, place + 1):
                place += 1
            place = max(place, start + 1)
            yield start, place, "word"


def _balanced(piece: str, first: bool) -> str | None:
    """Without a bracket that the piece did not open (``(so 2 + 3`` or ``5)``); None where brackets cannot be matched."""
    depth, low = 0, 0
    for character in piece:
        depth += (character in _OPEN) - (character in _CLOSE)
        low = min(low, depth)
    if low == 0 and depth == 0:
        return piece
    if low == 0 and first and piece.lstrip()[0] in _OPEN:
        return _balanced(piece.lstrip()[1:], first)
    if depth < 0 and not first and piece.rstrip()[-1] in _CLOSE:
        return _balanced(piece.rstrip()[:-1], first)
    return None


class _Reader:
    """Recursive descent: sum → product → power → atom. Brackets of all three kinds; ``2(3)`` and ``-2^2`` as on paper."""

    def __init__(self, text: str, names: dict[str, Fraction]) -> None:
        if len(text) > 4 * MAX_SIDE:
            raise NotArithmetic("too long")
        self.text, self.names, self.place = text, names, 0
        self.token: tuple[str, str] | None = None
        self._next()

    def _next(self) -> None:
        match = _TOKEN.match(self.text, self.place)
        if match is None:
            if self.text[self.place :].strip(" .\t\"'"):
                raise NotArithmetic(f"{self.text[self.place :][:20]!r}")
            self.token = None
            return
        self.place = match.end()
        self.token = (str(match.lastgroup), match[str(match.lastgroup)])

    def _is(self, signs: str) -> bool:
        return self.token is not None and self.token[0] == "sign" and self.token[1] in signs

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NotArithmetic("nested too deeply")
        value = self.product(depth)
        while self._is("+-"):
            sign = 1 if self._is("+") else -1
            self._next()
            value = _bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.signed(depth)
        while self._is("*/([{"):
            divides, implicit = self._is("/"), self._is(_OPEN)
            if not implicit:
                self._next()
            factor = self.signed(depth)
            if divides and factor == 0:
                raise NotArithmetic("divides by zero")
            value = _bounded(value / factor if divides else value * factor)
        return value

    def signed(self, depth: int) -> Fraction:
        sign = 1
        while self._is("+-"):
            sign = -sign if self._is("-") else sign
            self._next()
        return sign * self.power(depth)

    def power(self, depth: int) -> Fraction:
        base = self.atom(depth)
        if not self._is("^"):
            return base
        self._next()
        if depth >= MAX_DEPTH:
            raise NotArithmetic("nested too deeply")
        exponent = self.signed(depth + 1)
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT or (base == 0 and exponent < 0):
            raise NotArithmetic("an exponent that is not read")
        return _bounded(base**exponent.numerator)

    def atom(self, depth: int) -> Fraction:
        if self.token is None:
            raise NotArithmetic("ends too early")
        kind, text = self.token
        if kind == "number" and len(text) <= 40:
            self._next()
            return Fraction(text)
        if kind == "name" and text in self.names:
            self._next()
            return self.names[text]
        if kind == "sign" and text in _OPEN:
            self._next()
            value = self.sum(depth + 1)
            if not self._is(_CLOSE):
                raise NotArithmetic("a bracket is not closed")
            self._next()
            return value
        raise NotArithmetic(f"{text[:20]!r}")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotArithmetic("too large")
    return value


__all__ = ["Equation", "NotArithmetic", "judged", "value_of"]
