"""The fast path: plain decimal numbers are compared here, without sympy, with the verdict math-verify would give.

math-verify compares integers exactly and, as soon as one side is a float, both rounded to p decimals (`decimals_compared`;
its default is always 6, which makes .0000672 equal to .0000673). So

    a = b exactly                  -> equal
    both integers, a != b          -> not equal
    |a - b| > 2 * 10^-p            -> not equal   (two numbers that round alike to p decimals are at most 10^-p apart)
    otherwise, or > 15 digits      -> undecided: left to math-verify

Nothing is decided here that math-verify would decide otherwise (`tests/unit/test_verifier_fast_path.py`).
"""

from __future__ import annotations

import re
from fractions import Fraction

_PLAIN = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_MAX_DIGITS = 15  # a double holds 15 decimal digits, and so does math-verify's default precision
_ZEROS = re.compile(r"-?0*\.(0*)[1-9]\d*", re.ASCII)


def is_plain_number(text: str) -> bool:
    """True for `18`, `-3`, `1,234.50`, `007`; False for `1/2`, `10%`, `1e5`, `1,23`."""
    return _PLAIN.fullmatch(text) is not None


def decimals_compared(gold: str) -> int:
    """To how many decimals floats are rounded: 6, and for a gold below 0.1 six from its first significant digit."""
    small = _ZEROS.fullmatch(gold)
    return 6 + (len(small[1]) if small else 0)


def compare_plain_numbers(gold: str, answer: str) -> bool | None:
    """True or False where the verdict is certain, None where it is math-verify's to give."""
    if not (is_plain_number(gold) and is_plain_number(answer)):
        return None
    if max(len(gold), len(answer)) > _MAX_DIGITS:
        return None
    a, b = (Fraction(text.replace(",", "")) for text in (gold, answer))
    if a == b:
        return True
    if a.denominator == b.denominator == 1 and "." not in gold + answer:
        return False
    return False if abs(a - b) > Fraction(2, 10 ** decimals_compared(gold)) else None
