"""CountdownReward: does the expression reach the target with each given number exactly once?

    reward = 1[value(expression) = target and numbers(expression) = numbers given, as multisets]

The game of the television programme, as in TinyZero (github.com/Jiayi-Pan/TinyZero). How we differ: the expression is read by a parser of its
own into exact fractions, never by ``eval``; there is no reward for the form alone. Read is the inside of the last ``<answer>``, else the last
fenced block, else the last line: ``(3 + 5) * 4``, or ``(3 + 5) * 4 = 32``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.program_text import answer_block

MOST_CHARACTERS, MOST_DEPTH, MOST_DIGITS = 500, 50, 18
_TOKEN = re.compile(r"[ \t]*(?:([0-9]+)|([-+*/()]))")
_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-"})


class NoExpression(ValueError):
    """The text is no expression of whole numbers, ``+ - * /`` and brackets, or has no value."""


class _Reader:
    """Recursive descent over the tokens; no sign before a number, since the game has none."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise NoExpression(f"longer than {MOST_CHARACTERS} characters")
        self.tokens = _tokens(text)
        self.place = 0
        self.numbers: list[int] = []

    def _peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self.place += 1
        return token

    def whole(self) -> Fraction:
        value = self._sum(0)
        if self._peek():
            raise NoExpression(f"{self._peek()!r} is left over")
        return value

    def _sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._peek() in ("+", "-"):
            plus, term = self._next() == "+", self._product(depth)
            value = value + term if plus else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while self._peek() in ("*", "/"):
            times, factor = self._next() == "*", self._atom(depth)
            if not times and not factor:
                raise NoExpression("a division by zero")
            value = value * factor if times else value / factor
        return value

    def _atom(self, depth: int) -> Fraction:
        token = self._next()
        if token.isdigit():
            self.numbers.append(int(token))
            return Fraction(int(token))
        if token != "(" or depth >= MOST_DEPTH:
            raise NoExpression(f"{token!r} where a number or a bracket is needed (brackets: {MOST_DEPTH} deep at most)")
        value = self._sum(depth + 1)
        if self._next() != ")":
            raise NoExpression("a bracket is not closed")
        return value


def _tokens(text: str) -> list[str]:
    text = text.strip().translate(_SIGNS)
    tokens, place = [], 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or len(found[1] or "") > MOST_DIGITS:
            raise NoExpression(f"{text[place : place + 20]!r}")
        tokens.append(found[1] or found[2])
        place = found.end()
    return tokens


def value_and_numbers(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value, and the numbers in order. ``NoExpression`` for anything else than an expression."""
    reader = _Reader(expression)
    return reader.whole(), reader.numbers


def reaches(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether ``text`` is an expression, or ``expression = target``, that wins the game."""
    left, equals, right = text.strip().rstrip(".").strip("$`").partition("=")
    try:
        value, used = value_and_numbers(left)
        stated = Fraction(target) if not equals else _stated(right)
    except NoExpression:
        return False
    return value == stated == target and Counter(used) == Counter(numbers)


def _stated(text: str) -> Fraction:
    """What an expression is said to be; a target below 0 has a sign."""
    said = text.strip().translate(_SIGNS)
    return -value_and_numbers(said[1:])[0] if said.startswith("-") else value_and_numbers(said)[0]


class CountdownReward:
    """1.0 for an expression that reaches ``target`` with each of ``numbers`` exactly once, else 0.0."""

    columns = ("numbers", "target")  # what `LabTrainer` looks for in the data set before anything is loaded

    def __init__(self) -> None:
        self.__name__ = "countdown_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return "CountdownReward()"

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        numbers: Sequence[Sequence[int]] | None = None,
        target: Sequence[int] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Rewards in order; None where a row has no numbers or no target, or one that is not whole."""
        if completions is None or numbers is None or target is None:
            raise ValueError("CountdownReward needs completions=[...] and the columns 'numbers' and 'target'")
        if not len(completions) == len(numbers) == len(target):
            raise ValueError(
                f"got {len(completions)} completions, {len(numbers)} rows of numbers and {len(target)} targets; they must be one to one"
            )
        return [
            self._score(completion_text(text), row, goal)
            for text, row, goal in zip(completions, numbers, target, strict=True)
        ]

    def _score(self, text: str, numbers: Sequence[int], target: int | None) -> float | None:
        if not numbers or target is None:
            return None
        try:
            given, goal = [_whole(x) for x in numbers], _whole(target)
        except (TypeError, ValueError, ArithmeticError):
            return None
        return float(reaches(_last_line(answer_block(text)), given, goal))


def _whole(value: Any) -> int:
    """``24``, ``24.0`` or ``"24"``; ValueError for what is no whole number, which ``int`` would cut off."""
    exact = Fraction(value)
    if exact.denominator != 1:
        raise ValueError(value)
    return int(exact)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


__all__ = ["CountdownReward", "NoExpression", "reaches", "value_and_numbers"]
