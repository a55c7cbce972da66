"""Votes of maj@k: which answer a completion votes for, and when two answers are the same vote."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo_lab.verifiers.canonical import canonical

ReadAnswer = Callable[[str], "str | None"]
"""Function from a completion's text to its answer, or to None if it has none."""

_LONGEST_NAME = 200
# No exponent, and at most forty digits, which is more than an answer needs: Fraction("1e999999999") would take hours.
DECIMAL = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})", re.ASCII)
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(\d{1,40})/(\d{1,40}))", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)", re.ASCII)


def answer_reader(reward: Any) -> ReadAnswer | None:
    """Return the function with which an `AccuracyReward` (or a subclass) reads the answer of a completion; None for
    other rewards."""
    from grpo_lab.rewards.math.accuracy import AccuracyReward

    if not isinstance(reward, AccuracyReward):
        return None
    return lambda completion: getattr(reward.read(completion), "text", None)


def vote_key(answer: str) -> str:
    """Return the name under which an answer votes.

    Numbers and fractions vote by value (`$1,234.50` as `1234.5`, `1/2` as `\\frac12`), anything else by its canonical
    spelling. So answers whose equality only algebra can show vote apart.
    """
    text = answer.strip()
    if len(text) > _LONGEST_NAME:
        return text
    text = "".join(canonical(text).split())
    if _THOUSANDS.match(text):
        number = text.replace(",", "")
    else:
        number = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    if DECIMAL.fullmatch(number):
        return str(Fraction(number))
    parts = _FRACTION.fullmatch(number)
    if parts and int(bottom := parts[3] or parts[5]):
        return str(Fraction(int(parts[1] + (parts[2] or parts[4])), int(bottom)))
    return text
