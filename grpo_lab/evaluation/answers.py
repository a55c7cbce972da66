"""Which answer a completion gives, and under what name that answer votes in maj@k."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo_lab.verifiers.canonical import canonical

ReadAnswer = Callable[[str], "str | None"]

_LONGEST_NAME = 200
# Forty digits are more than an answer needs; without a bound "1e999999999" would be expanded for hours.
_DECIMAL = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})", re.ASCII)
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(\d{1,40})/(\d{1,40}))", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)", re.ASCII)


def answer_reader(reward: Any) -> ReadAnswer | None:
    """How to read answers where the caller did not say: as `AccuracyReward` (or its kin) does. None for other rewards,
    of whose answers we know nothing."""
    from grpo_lab.rewards.accuracy import AccuracyReward

    if not isinstance(reward, AccuracyReward):
        return None

    def read(completion: str) -> str | None:
        answer = reward.read(completion)
        return None if answer is None else answer.text

    return read


def vote_key(answer: str) -> str:
    """The name under which an answer votes: numbers and fractions by value (`$1,234.50` and `1234.5` are one, `1/2` and
    `\\frac12` too), everything else by its canonical spelling.

    Cheaper and stricter than the verifier's equality, which would need every pair: two spellings that only algebra can
    match vote apart, for right and wrong answers alike.
    """
    text = answer.strip()
    if len(text) > _LONGEST_NAME:
        return text
    text = "".join(canonical(text).split())
    number = text.replace(",", "") if _THOUSANDS.match(text) else _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    if _DECIMAL.fullmatch(number):
        return str(Fraction(number))
    parts = _FRACTION.fullmatch(number)
    if parts and int(bottom := parts[3] or parts[5]):
        return str(Fraction(int(parts[1] + (parts[2] or parts[4])), int(bottom)))
    return text
