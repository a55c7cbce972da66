"""CountdownReward: does the expression reach the target with each given number exactly once?

    reward = 1[value(expression) = target and numbers(expression) = numbers given, as multisets]

The game of the television programme, as in TinyZero (github.com/Jiayi-Pan/TinyZero). How we differ: the expression is
read into exact fractions, never by ``eval``; there is no reward for the form alone. Read is the inside of the last
``<answer>``, else the last fenced block, else the last line: ``(3 + 5) * 4``, or ``(3 + 5) * 4 = 32``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from grpo_lab.rewards.arithmetic import NotArithmetic, value_of
from grpo_lab.rewards.completion import RowReward, answer_block

MOST_CHARACTERS, MOST_DEPTH, MOST_DIGITS = 500, 50, 18
_TOKEN = re.compile(r"[ \t]*(?:([0-9]+)|([-+*/()]))")
_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-"})


class NoExpression(ValueError):
    """The text is no expression of whole numbers, ``+ - * /`` and brackets, or has no value."""


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
    """The exact value, and the numbers in order. ``NoExpression`` for anything else than an expression.

    No sign before a number, since the game has none, and no product without its sign.
    """
    if len(expression) > MOST_CHARACTERS:
        raise NoExpression(f"longer than {MOST_CHARACTERS} characters")
    tokens, depth = _tokens(expression), 0
    for before, token in pairwise(["(", *tokens]):
        depth += (token == "(") - (token == ")")
        if depth > MOST_DEPTH or (token.isdigit() or token == "(") == (before.isdigit() or before == ")"):
            raise NoExpression(f"{token!r} after {before!r}, or brackets deeper than {MOST_DEPTH}")
    try:
        return value_of(" ".join(tokens)), [int(token) for token in tokens if token.isdigit()]
    except NotArithmetic as error:
        raise NoExpression(str(error)) from None


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


class CountdownReward(RowReward):
    """1.0 for an expression that reaches ``target`` with each of ``numbers`` exactly once, else 0.0.

    None where a row has no numbers or no target, or one that is not whole.
    """

    columns = ("numbers", "target")

    def __init__(self) -> None:
        self.__name__ = "countdown_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return "CountdownReward()"

    def score(self, text: str, *row: Any) -> float | None:
        numbers, target = row
        if not numbers or target is None:
            return None
        try:
            given, goal = [_whole(x) for x in numbers], _whole(target)
        except (TypeError, ValueError, ArithmeticError):
            return None
        return float(reaches(answer_block(text).strip().rpartition("\n")[2], given, goal))


def _whole(value: Any) -> int:
    """``24``, ``24.0`` or ``"24"``; ValueError for what is no whole number, which ``int`` would cut off."""
    exact = Fraction(value)
    if exact.denominator != 1:
        raise ValueError(value)
    return int(exact)
