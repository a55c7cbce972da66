"""Verdicts of a mathematical comparison, and checks of scores: a score is a number or None, and correct from 1 on."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The seven outcomes of a comparison. `EQUAL` earns the reward; `UNPARSEABLE_GOLD` and `UNJUDGED` leave a row
    unscored; all others earn nothing. `UNJUDGED` means that the worker was killed from outside twice, or that the batch
    had no time left."""

    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    UNPARSEABLE_GOLD = "unparseable_gold"
    UNPARSEABLE_ANSWER = "unparseable_answer"
    TIMEOUT = "timeout"
    CRASH = "crash"
    UNJUDGED = "unjudged"


@dataclass(frozen=True)
class MathVerdict:
    """A verdict, and in words its reason: which rule decided, or what went wrong."""

    verdict: Verdict
    reason: str

    @property
    def equal(self) -> bool:
        return self.verdict is Verdict.EQUAL


CORRECT_FROM = 1.0
"""A score of at least this is correct. Accuracy rewards give 1.0 or 0.0; partial credit is not a solved problem."""


def as_number(value: Any) -> float | None:
    """Convert a score, which may be a number of numpy or torch, to a Python float; None stays None. A number too large
    for a float becomes ±inf. Raises TypeError, ValueError or RuntimeError if it is no number; a text never is one."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise TypeError("text")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_scores(
    values: Any, count: int, who: str, *, infinite: bool = False, nan: bool = True
) -> list[float | None]:
    """Check the scores that a reward returned, and return them as floats or None.

    Args:
        values: what it returned.
        count: number of completions; there must be as many scores.
        who: what to call the reward in an error message.
        infinite: whether a score may be ±inf.
        nan: whether a score may be NaN.

    Raises:
        ValueError: says in one line who returned what, for which completion, and what is allowed.
    """
    try:
        number = None
        if not isinstance(values, str | bytes | Mapping | Set):
            number = len(values)
    except TypeError:  # a number, a tensor without dimensions, a coroutine
        number = None
    form = f"it must return a list with one number or None per completion ({count})"
    if number is None:
        raise ValueError(f"{who} returned a {type(values).__name__}; {form}")
    if number != count:
        raise ValueError(f"{who} returned {number} rewards for {count} completions; {form}")
    return [_checked(value, place, who, infinite, nan) for place, value in enumerate(values)]


def _checked(value: Any, place: int, who: str, infinite: bool, nan: bool) -> float | None:
    """Check the score of completion ``place``; see ``checked_scores``."""
    try:
        found = as_number(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
        infinite = False
        nan = False
    if found is None or math.isfinite(found) or (nan if math.isnan(found) else infinite):
        return found
    try:
        shown = " ".join(reprlib.repr(value).split())
    except ValueError:  # a whole number of thousands of digits, which Python does not write out
        shown = f"<{type(value).__name__}>"
    allowed = "allowed are finite numbers, or None for a completion that cannot be scored"
    raise ValueError(f"{who} returned {shown} for completion {place}; {allowed}")
