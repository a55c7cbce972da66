"""Verdicts of a mathematical comparison, and checks of scores: a score is a number or None, and correct from 1 on."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The seven outcomes of a comparison. Only `EQUAL` earns a reward; `UNPARSEABLE_GOLD` and `UNJUDGED` leave a row
    unscored. `UNJUDGED`: its worker was killed from outside twice, or the batch had no time left."""

    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    UNPARSEABLE_GOLD = "unparseable_gold"
    UNPARSEABLE_ANSWER = "unparseable_answer"
    TIMEOUT = "timeout"
    CRASH = "crash"
    UNJUDGED = "unjudged"


@dataclass(frozen=True)
class MathVerdict:
    """A `verdict` and, in words, its `reason`: which rule decided, or what went wrong."""

    verdict: Verdict
    reason: str

    @property
    def equal(self) -> bool:
        return self.verdict is Verdict.EQUAL


CORRECT_FROM = 1.0
"""A score of at least this is correct. Accuracy rewards give 1.0 or 0.0; partial credit is not a solved problem."""


def as_number(value: Any) -> float | None:
    """Convert a score to a Python float (numpy's and torch's numbers, too), ±inf if it is too large for one; None
    stays. Raises TypeError, ValueError or RuntimeError if it is no number. Text is none, even if it could be read as
    one."""
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
    """Check what ``who`` returned for ``count`` completions, a number or None each, and return these as floats.
    ``infinite`` and ``nan`` allow ±inf and NaN. Raises ValueError that says in one line who returned what, where,
    and what is allowed."""
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
