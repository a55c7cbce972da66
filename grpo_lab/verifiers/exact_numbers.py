r"""Compare decimals, fractions and mixed numbers without sympy, with the verdict that math-verify would give.

    one number   18   -3.5   7/14   \frac{3}{8}   12\frac{3}{5}           several      3, 4     9999.86, 9999\frac{6}{7}

math-verify compares integers exactly. As soon as one side is a float, it compares both rounded to p decimals
(`decimals_compared`; math-verify's own default, always 6, makes .0000672 equal to .0000673). So

    both decimals: a = b exactly                 -> equal
                   both integers, a != b         -> not equal
                   |a - b| > 2 * 10^-p           -> not equal  (numbers that round alike: at most 10^-p apart)
                   more than 15 digits           -> undecided
    both fractions of integers                   -> equal exactly if their values are
    the same spelling                            -> equal
    values further apart than `_FAR`             -> not equal  (several numbers beside one: if each is)
    otherwise                                    -> undecided: left to math-verify

Every decision here is the one that math-verify would make. What is not in this small grammar is undecided (None).
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

_PLAIN_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\\?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_MAX_DIGITS = 15  # a double holds 15 decimal digits, and so does math-verify's default precision
_ZEROS = re.compile(r"-?0*\.(0*)[1-9]\d*", re.ASCII)
_FAR = 5e-6
"""Numbers that differ by more than this share of the larger one, or of 1 if both are smaller, are surely different for
math-verify, which rounds to 1e-6."""
_LONGEST, _MOST_PARTS = 120, 8
_INT = r"\d{1,9}"
_PLAIN = r"(?:\d{1,3}(?:,\d{3}){1,3}|\d{1,12})(?:\.\d{1,20})?"
_OVER = rf"\\frac\s?(?:\{{(-?{_INT})\}}\s?\{{({_INT})\}}|(\d)(\d))"
_DECIMAL = re.compile(_PLAIN, re.ASCII)
_FRACTION = re.compile(rf"(?:({_INT})\s?/\s?({_INT})|(?:({_INT})\s?)?{_OVER})", re.ASCII)
_JOINED_AGAIN = re.compile(r",\s*\d{3}(?!\d)", re.ASCII)  # "1, 234" may be 1234


def is_plain_number(text: str) -> bool:
    """Return whether a text is an integer or a decimal, perhaps with thousands commas: `18`, `-3`, `1,234.50`, `007`;
    not `1/2`, `10%`, `1e5`, `1,23`."""
    return _PLAIN_NUMBER.fullmatch(text) is not None


def without_thousands(text: str) -> str:
    """Remove the thousands commas of a number: `1,234.5` -> `1234.5`. Any other text stays, such as `3,5` and
    `(1,2)`."""
    if _THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    return text


def decimals_compared(gold: str) -> int:
    """Return to how many decimals floats are rounded for comparison: 6 or, for a gold such as 0.00123, six from its
    first significant digit on."""
    small = _ZEROS.fullmatch(gold)
    return 6 + (len(small[1]) if small else 0)


def compare_plain_numbers(gold: str, answer: str) -> bool | None:
    """Return whether two plain numbers are equal; None if only math-verify can tell."""
    if max(len(gold), len(answer)) > _MAX_DIGITS or not (is_plain_number(gold) and is_plain_number(answer)):
        return None
    a, b = (Fraction(text.replace(",", "")) for text in (gold, answer))
    if a == b:
        return True
    if a.denominator == b.denominator == 1 and "." not in gold + answer:
        return False
    if abs(a - b) > Fraction(2, 10 ** decimals_compared(gold)):
        return False
    return None


def compare_numbers(gold: str, answer: str) -> bool | None:
    """Return whether two decimals, fractions or mixed numbers are equal; None if only math-verify can tell. Both must
    be in canonical spelling."""
    plain = compare_plain_numbers(gold, answer)
    if plain is not None:
        return plain
    wanted = _value(gold)
    if wanted is None:
        return None
    if gold == answer:
        return True
    given = _value(answer)
    if given is None:
        return False if _all_far(wanted, answer) else None
    if "." not in gold + answer:
        return wanted == given
    if _far(wanted, given):
        return False
    return None


def _all_far(wanted: Fraction, answer: str) -> bool:
    """Return whether an answer is a list of numbers that are all far from the one ``wanted``. Then it is wrong, however
    a list is compared with a number."""
    parts = answer.split(", ")
    if len(answer) > _LONGEST or not 1 < len(parts) <= _MOST_PARTS or _JOINED_AGAIN.search(answer):
        return False
    return all((value := _value(part)) is not None and _far(wanted, value) for part in parts)


def _far(a: Fraction, b: Fraction) -> bool:
    """Return whether two numbers are further apart than `_FAR`."""
    return abs(float(a) - float(b)) > _FAR * max(1.0, abs(float(a)), abs(float(b)))


@lru_cache(maxsize=4096)
def _value(text: str) -> Fraction | None:
    """Return the value of one number; None if it is outside the grammar."""
    if len(text) > _LONGEST:
        return None
    bare = text.removeprefix("-")
    sign = -1 if bare != text else 1
    if _DECIMAL.fullmatch(bare):
        return sign * Fraction(bare.replace(",", ""))
    fraction = _FRACTION.fullmatch(bare)
    if fraction is None:
        return None
    whole, *parts = fraction[3], *(group for group in fraction.group(1, 2, 4, 5, 6, 7) if group is not None)
    above, below = map(int, parts)
    if not below or (whole is not None and not 0 < Fraction(above, below) < 1):
        return None  # no value, or a strange mixed number
    return sign * (int(whole or 0) + Fraction(above, below))
