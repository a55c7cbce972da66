r"""Find the equations that a text states, and check each with exact fractions; also rewards made of these checks.

    "4 * $10.00 = $40.00. That makes 40 + 3 = 44."   -> 4 * 10 = 40 holds, 40 + 3 = 44 does not
    "A = (2 + 3) = 5, B = 4. Then A * B = 5 * 4 = 21" -> 2 + 3 = 5 holds, 5 * 4 = 21 does not

A text is put into one plain form of arithmetic (``plain_arithmetic.py``) and cut into sentences (``judged``). In each
sentence the arithmetic on both sides of every equals sign is found (``_piece``), computed (``value_of``) and compared.

A chain a = b = c is judged link by link. A name (a capital letter that stands alone) has the value that the text last
gave it. A link is judged only if both sides can be read as arithmetic, without units, words or unknowns: a checker that
guesses would reward text that confuses it. Every pattern, size and depth is bounded, so that the time stays linear in
the length of a hostile text.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_lab.rewards.completion import whole_text
from grpo_lab.rewards.plain_arithmetic import ABOUT, plain
from grpo_lab.rewards.steps import SplitStepReward

#: Limits of what is read: characters of one side of an equation, depth of its brackets, size of an exponent, and bits
#: of a value's numerator and denominator.
MAX_SIDE = 400
MAX_DEPTH = 60
MAX_EXPONENT = 64
MAX_BITS = 2048

#: GSM8K's calculator: ``3 * 4 = <<3*4=12>>12``.
_CALCULATOR = re.compile(r"<<([^<>]{1,200})>>")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<name>(?<![A-Za-z])[A-Z](?![A-Za-z]))|(?P<sign>[-+*/^()\[\]{}]))"
)
_SIGN_OF_EQUALITY = re.compile(r"(?<![<>!=:])=(?!=)")
_BREAK = re.compile(
    r"[;\n]|\((?=[a-z]{2})|[.!?,:](?=\s|$)|\b(?:and|so|then|where|which|because|since|therefore)\b", re.IGNORECASE
)
_LONE = re.compile(r"[\s(+-]*\d*\.?\d+[\s)]*")
_OPEN, _CLOSE = "([{", ")]}"
_AS_PYTHON = {"^": "**", "[": "(", "{": "(", "]": ")", "}": ")"}
_OPERATIONS: Any = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
#: Number of characters that are read. A worked solution states its equations long before.
MOST_READ = 8_000
_OPERATION = r"\d[^=\n\d]{0,20}(?:[-+*/×÷·⋅−^]|\bx\b|\\times|\\cdot|\\div)[^=\n\d]{0,20}\d|\\[dt]?frac"
_CALCULATION = re.compile(rf"(?:{_OPERATION})[^=\n]{{0,80}}=|=[^=\n]{{0,80}}?(?:{_OPERATION})")


@dataclass(frozen=True)
class Equation:
    """An equation, or one link of a chain a = b = c: both sides as they were written, and whether it holds."""

    left: str
    right: str
    holds: bool


class NotArithmetic(ValueError):
    """Raised for a text that is no arithmetic, or too large to be read."""


def judged(text: str, names: dict[str, Fraction] | None = None) -> list[Equation]:
    """Return the equations of ``text`` that can be judged, in their order.

    ``names`` holds the values of the names that earlier steps of a solution have set. Those that ``text`` sets are
    added to it, for the steps that follow.
    """
    known = {} if names is None else names
    found: list[Equation] = []
    calculations = "".join(f"{inside}\n" for inside in _CALCULATOR.findall(text))
    for sentence in _BREAK.split(plain(calculations + _CALCULATOR.sub(" ", text))):
        if sentence is not None and "=" in sentence:
            sides = _SIGN_OF_EQUALITY.split(sentence)
            found += _judge_chain([side if len(side) <= MAX_SIDE else "?" for side in sides], known)
    return found


def value_of(expression: str, names: dict[str, Fraction] | None = None) -> Fraction:
    """Compute the exact value of an expression such as ``1 + 2*(3 - 4)/5^2``, with brackets of all three kinds.

    ``2(3)`` is a product, and ``-2^2`` is -4, as on paper. A capital letter has its value in ``names``. Raises
    ``NotArithmetic`` for any other text, and for an expression that is too large.
    """
    if len(expression) > 4 * MAX_SIDE:
        raise NotArithmetic("too long")
    values: list[Fraction] = []
    written = ""  # the expression for Python's parser; the name `_n_` stands for `values[n]`
    depth = 0
    place = 0
    while match := _TOKEN.match(expression, place):
        place = match.end()
        kind = str(match.lastgroup)
        token = match[kind]
        if kind == "sign":
            depth += (token in _OPEN) - (token in _CLOSE)
            if token in _OPEN and written.endswith((")", "_")):
                written += " *"  # `2(3)` is a product
            written += f" {_AS_PYTHON.get(token, token)}"
        else:
            if kind == "number" and len(token) <= 40:
                values.append(Fraction(token))
            elif names and token in names:
                values.append(names[token])
            else:
                raise NotArithmetic(f"{token[:20]!r}")
            written += f" _{len(values) - 1}_"
        if depth > MAX_DEPTH:
            raise NotArithmetic("nested too deeply")
    if expression[place:].strip(" .\t\"'"):
        raise NotArithmetic(f"{expression[place:][:20]!r}")
    try:
        return _evaluated(ast.parse(written.strip(), mode="eval").body, values)
    except (SyntaxError, RecursionError, MemoryError):
        raise NotArithmetic(f"{expression[:40]!r} is no expression") from None


def _evaluated(node: ast.expr, values: list[Fraction]) -> Fraction:
    """Compute the value of a syntax tree in which the name ``_n_`` stands for ``values[n]``.

    Left operands are followed in a loop, and only right ones by recursion: a long sum, or a long row of signs, is deep
    on its left and would exceed Python's limit of recursion.
    """
    operations: list[ast.BinOp | ast.UnaryOp] = []
    while isinstance(node, ast.BinOp | ast.UnaryOp):
        operations.append(node)
        node = node.left if isinstance(node, ast.BinOp) else node.operand
    if not isinstance(node, ast.Name):
        raise NotArithmetic("empty brackets")
    value = values[int(node.id.strip("_"))]
    for operation in reversed(operations):
        if isinstance(operation, ast.BinOp):
            value = _combined(value, operation.op, _evaluated(operation.right, values))
        elif isinstance(operation.op, ast.USub):
            value = -value
    return value


def _combined(left: Fraction, operation: ast.operator, right: Fraction) -> Fraction:
    """Apply one operation. Raises ``NotArithmetic`` for a division by zero, an exponent that is no small whole number,
    and a result that is too large."""
    if isinstance(operation, ast.Pow):
        if right.denominator != 1 or abs(right) > MAX_EXPONENT or (left == 0 and right < 0):
            raise NotArithmetic("an exponent that is not read")
        value = left**right.numerator
    elif isinstance(operation, ast.Div) and right == 0:
        raise NotArithmetic("divides by zero")
    else:
        value = _OPERATIONS[type(operation)](left, right)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotArithmetic("too large")
    return value


def _judge_chain(sides: list[str], known: dict[str, Fraction]) -> list[Equation]:
    """Judge the links of a chain ``sides[0] = sides[1] = …``. If it sets a name (``A = 2 + 3 = 5``), the value of the
    last side that can be read goes into ``known``."""
    found: list[Equation] = []
    name: str | None = None
    for place, (before, after) in enumerate(itertools.pairwise(sides)):
        about = after.lstrip().startswith(ABOUT)
        after = after.lstrip().removeprefix(ABOUT)
        left = _piece(before, at_its_end=True)
        right = _piece(after, at_its_end=False)
        worded = any(kind == "word" for *_, kind in _tokens(before))
        starts = place == 0 or worded
        if starts:
            name = None
            if left is not None and re.fullmatch(r"[A-Z]", left):
                name = left
        sets_name = starts and name is not None
        left_value = None if sets_name else _value(left, known)
        right_value = _value(right, known)
        # a lone number behind words set to another (`4 boxes with 6 = 24`): what was counted is not written
        counted = place == 0 and worded and _LONE.fullmatch(left or "") and _LONE.fullmatch(right or "")
        if left and right and left_value is not None and right_value is not None and not counted:
            same = _about if about else _same
            found.append(Equation(left, right, same(left_value, right_value, right)))
        if name is not None and right_value is not None:
            known[name] = right_value
    return found


def _value(piece: str | None, known: dict[str, Fraction]) -> Fraction | None:
    """Return ``value_of`` a piece; None if there is no piece, or it is no arithmetic."""
    try:
        if piece is None:
            return None
        return value_of(piece, known)
    except NotArithmetic:
        return None


def _same(left: Fraction, right: Fraction, written: str) -> bool:
    """Return whether both sides are equal, exactly or rounded to the decimals of the right side, which was ``written``
    so (``2/3 = 0.67``). Nothing is rounded to a whole number. A percentage alone may also stand for its number:
    ``18 / 450 * 100 = 4%``."""
    if left == right or (re.fullmatch(r"\s*\(\d*\.?\d+/100\)\s*", written) and left == 100 * right):
        return True
    decimals = re.fullmatch(r"[\s(\[{-]*\d*\.(\d+)[\s)\]}]*", written)
    return decimals is not None and abs(left - right) <= Fraction(1, 2 * 10 ** len(decimals[1]))


def _about(left: Fraction, right: Fraction, written: str) -> bool:
    """Return whether ``≈`` holds: the sides differ by less than one unit of the last significant digit in
    ``written``, the text of the right side (``10/3 ≈ 3.33``, ``1,234 ≈ 1,200``)."""
    digits = re.fullmatch(r"[\s(\[{+-]*(\d*)\.?(\d*)(/100)?[\s)\]}]*", written)
    if digits is None:
        return left == right
    whole, decimals, percent = digits.groups()
    if decimals:
        unit = Fraction(1, 10 ** len(decimals))
    else:
        unit = Fraction(10 ** (len(whole) - len(whole.rstrip("0"))))
    return abs(left - right) < unit / (100 if percent else 1)


def _piece(side: str, at_its_end: bool) -> str | None:
    """Return the arithmetic in ``side`` that touches the equals sign, which is at the end of a left side and at the
    start of a right one; None if there is none, or words are part of the sum."""
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


def _cut_in_a_sum(side: str, run: list[tuple[int, int]], runs: list[list[tuple[int, int]]], at_its_end: bool) -> bool:
    """Return whether the piece is tied to a word, by an operator or by no space between them (``5 apples + 3``,
    ``4x - 8``).

    ``run`` holds the (start, end) of the piece's tokens in ``side``; ``runs``, those of all pieces between words.
    """
    if at_its_end:
        start, end = run[0]
        token = side[start:end].strip()
        glued = start > 0 and not (side[start - 1].isspace() or side[start - 1] in "\"'`*_~:.,")
        tied = token in "+*/^" or (token == "-" and side[end : end + 1].isspace())  # `-3` is a number with its sign
        beyond = next((other[-1] for other in reversed(runs[:-1]) if other), None)
    else:
        start, end = run[-1]
        token = side[start:end].strip()
        glued = re.match(r"[a-z](?![a-zA-Z])", side[end:]) is not None
        tied = token in "+-*/^"
        beyond = next((other[0] for other in runs[1:] if other), None)
    # `beyond` is the token on the other side of the words
    return glued or tied or (beyond is not None and side[beyond[0] : beyond[1]].strip() in "+-*/^")


def _tokens(side: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, kind) of each token: a ``number``, ``name`` or ``sign`` of arithmetic, or a ``word``, which is
    anything else. White space, quotes and marks of emphasis are skipped."""
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


def _balanced(piece: str, at_its_end: bool) -> str | None:
    """Remove outer brackets that have no partner in the piece: opening ones of a left side (``(2 + 3`` of
    ``(so 2 + 3 = 5)``), closing ones of a right side (``5)``). None if brackets still do not match."""
    depth = 0
    lowest = 0
    for character in piece:
        depth += (character in _OPEN) - (character in _CLOSE)
        lowest = min(lowest, depth)
    if lowest == 0 and depth == 0:
        return piece
    if lowest == 0 and at_its_end and piece.lstrip()[0] in _OPEN:
        return _balanced(piece.lstrip()[1:], at_its_end)
    if depth < 0 and not at_its_end and piece.rstrip()[-1] in _CLOSE:
        return _balanced(piece.rstrip()[:-1], at_its_end)
    return None


class EquationSteps(SplitStepReward):
    """Score a step 1 if every equation in it that can be judged holds, 0 if one does not; a step without any is not
    scored.

    A name that the solution sets (``A = 3 + 4``) keeps its value in later steps. A wrong *plan* with right arithmetic
    is not noticed, and a model could learn to write trivial equations: use it beside an outcome reward.

    Source: ours, in the place of DeepSeekMath's process reward model (arXiv 2402.03300, §4.1.3).

    Args:
        split: function from a text to the character indices where its steps end, or ``"line"`` (default),
            ``"paragraph"``.
        tokenizer: the one that made the completions' token ids; ``None``: the trainer's.
    """

    __name__ = "equation_steps"

    def score_texts(self, prompt: Any, steps: Sequence[str]) -> list[float | None]:
        names: dict[str, Fraction] = {}
        found = [[equation.holds for equation in judged(step, names)] for step in steps]
        return [float(all(holds)) if holds else None for holds in found]


def equation_list(text: str) -> tuple[str, ...]:
    """Return the equations of ``text`` that can be judged, in their order, without spaces; a chain a = b = c counts as
    two.

    Two texts with the same list are one way of solving (RFT, arXiv 2308.01825, section 3.3): "Ann has 4 * 6 = 24
    stamps. She keeps 24-5=19." -> ("4*6=24", "24-5=19").
    """
    return tuple("".join(f"{one.left}={one.right}".split()) for one in judged(text))


def calculates_right(text: str) -> bool:
    """Return whether every equation of ``text`` that can be judged holds; true where there is none."""
    return all(one.holds for one in judged(text))


def works_out(text: str) -> bool:
    """Return whether a line of ``text`` has an operation on numbers and an equals sign, right or wrong: ``4*6=24``,
    not ``x = 24``. Only the first ``MOST_READ`` characters are read. Words that reason without a calculation do not
    count."""
    return _CALCULATION.search(text[:MOST_READ]) is not None


def worked_out(completions: list[Any], **_: Any) -> list[float]:
    """Return 1 for a completion that writes a calculation down (``works_out``), else 0.

    Use it at weight 0, to watch ``rewards/worked_out/mean``. As a reward it would teach a model to write calculations,
    needed or not. TRL sums the rewards that are not None: with this one, a completion that every other reward calls
    unscorable gets 0.
    """
    return [float(works_out(whole_text(completion))) for completion in completions]
