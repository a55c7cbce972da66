"""Keep values as the file writes them: a gold is text, and a parsed number may print otherwise than it was written.

0.00005 -> "0.00005"  (Python: 5e-05)     0.10 -> "0.10"     12345678901234567.0 -> all of its digits
numpy.float32(0.1) -> "0.1"               Decimal("1E+3") -> "1000"          Fraction(1, 3) -> "1/3"
"""

from __future__ import annotations

import json
import math
import operator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

_LONGEST = 4000
"""Largest number of digits of a whole number that Python reads and writes."""


class WrittenFloat(float):
    """A float that remembers how it was written: ``WrittenFloat("0.10").text`` is ``"0.10"``.

    Args:
        text: the number as it was written.
        value: its value, if that is not ``float(text)``, as for a number of another precision.
    """

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str, value: float | None = None) -> WrittenFloat:
        made = super().__new__(cls, text if value is None else value)
        made.text = text
        return made

    def __reduce__(self) -> tuple[type[WrittenFloat], tuple[str, float]]:
        return WrittenFloat, (self.text, float(self))


def whole_number(text: str) -> int | str:
    """Convert a text of digits to an integer; return the text itself if it has more digits than Python converts."""
    if len(text) <= _LONGEST:
        return int(text)
    return text


def number_text(value: Any) -> str | None:
    """Write a finite number of Python, numpy or torch in digits, without an exponent unless it was written with one or
    needs more than ``_LONGEST`` digits. Return None for anything else: also for a truth value, and for an integer with
    more digits than Python converts."""
    if isinstance(value, WrittenFloat):
        if math.isfinite(value) or value.text[-1:].isdigit():
            return value.text
        return None
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        with suppress(ValueError):  # more digits than Python writes
            return str(value)
        return None
    if isinstance(value, float) and not hasattr(value, "dtype"):
        if math.isfinite(value):
            return _in_digits(Decimal(repr(value)))
        return None
    if isinstance(value, Decimal):
        if value.is_finite():
            return _in_digits(value)
        return None
    if isinstance(value, Fraction):
        return str(value)
    return _of_array(value)


def _of_array(value: Any) -> str | None:
    """Write a number of numpy or torch in the fewest digits that identify it in its own precision; None for anything
    else."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value if value.element_size() != 2 else value.float()).numpy()
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "dtype"):
        return None
    if value.dtype.kind in "iu":
        return str(operator.index(value.item()))
    if value.dtype.kind == "f":
        if math.isfinite(value):
            return _in_digits(Decimal(str(value[()])))
        return None
    return None


def _in_digits(number: Decimal) -> str:
    """Write a decimal without an exponent, or with one if it would need more than ``_LONGEST`` digits."""
    if number == number.to_integral_value():
        if number.adjusted() < _LONGEST:
            return str(int(number))
        return str(number)
    if number.adjusted() > -_LONGEST:
        return f"{number:f}"
    return str(number)


def written(value: Any) -> str:
    """Write any value as its file does: text as it is, numbers in their digits, everything else as JSON."""
    if isinstance(value, str):
        return value
    return _json(value)


def _json(value: Any) -> str:
    """Write a value as JSON, its numbers by ``number_text``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_json(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_json, value)) + "]"
    text = number_text(value)
    if text is None:
        return json.dumps(value, ensure_ascii=False, default=str)
    return text
