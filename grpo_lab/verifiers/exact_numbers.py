r"""Numbers that need no sympy: decimals, fractions, mixed numbers, roots and multiples of pi, with the verdict math-verify would give.

    one number   18   -3.5   7/14   \frac{3}{8}   12\frac{3}{5}   7\pi   \sqrt{34} + 3\sqrt{10}   \frac{3\sqrt{2}}{4}
    several      3, 4     9999.86, 9999\frac{6}{7}

math-verify compares integers exactly and, as soon as one side is a float, both rounded to p decimals (`decimals_compared`;
its default is always 6, which makes .0000672 equal to .0000673). So

    both decimals: a = b exactly                 -> equal
                   both integers, a != b         -> not equal
                   |a - b| > 2 * 10^-p           -> not equal  (two that round alike to p decimals are at most 10^-p apart)
                   more than 15 digits           -> undecided
    both fractions of integers                   -> equal exactly where their values are
    the same spelling                            -> equal
    values further apart than `_FAR`             -> not equal; of several numbers beside one: each further apart
    otherwise                                    -> undecided: left to math-verify

Nothing is decided here that math-verify would decide otherwise (`tests/unit/test_verifier_fast_path.py`). What is not in this
small grammar, to the last character, is undecided.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

_PLAIN_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_MAX_DIGITS = 15  # a double holds 15 decimal digits, and so does math-verify's default precision
_ZEROS = re.compile(r"-?0*\.(0*)[1-9]\d*", re.ASCII)


def is_plain_number(text: str) -> bool:
    """True for `18`, `-3`, `1,234.50`, `007`; False for `1/2`, `10%`, `1e5`, `1,23`."""
    return _PLAIN_NUMBER.fullmatch(text) is not None


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


_FAR = 5e-6
"""Apart by more than this share of the larger (or of 1): sure. math-verify rounds to 1e-6; a sum here errs by less than 1e-6, since
its at most six terms are below 10^5 sqrt(10^5) pi = 10^8 each."""
_LONGEST, _MOST_TERMS, _MOST_PARTS = 120, 6, 8
_INT, _SMALL = r"\d{1,9}", r"\d{1,5}"
_PLAIN = r"(?:\d{1,3}(?:,\d{3}){1,3}|\d{1,12})(?:\.\d{1,20})?"
_OVER = rf"\\frac\s?(?:\{{(-?{_INT})\}}\s?\{{({_INT})\}}|(\d)(\d))"
_DECIMAL = re.compile(_PLAIN, re.ASCII)
_FRACTION = re.compile(rf"(?:({_INT})\s?/\s?({_INT})|(?:({_INT})\s?)?{_OVER})", re.ASCII)
_ROOT = rf"\\sqrt\s?\{{({_SMALL})\}}"
_PI = r"(\\pi)(?![A-Za-z])"
_PRODUCT = re.compile(rf"({_SMALL})?\s?(?:{_ROOT})?\s?(?:{_PI})?", re.ASCII)
_PRODUCT_OVER = re.compile(rf"\\frac\s?\{{({_SMALL})?\s?(?:{_ROOT})?\s?(?:{_PI})?\}}\s?\{{({_INT})\}}", re.ASCII)
_SIGN = re.compile(r"\s?([+-])\s?")
_JOINED_AGAIN = re.compile(r",\s*\d{3}(?!\d)", re.ASCII)  # "1, 234" may be 1234


def compare_numbers(gold: str, answer: str) -> bool | None:
    """True or False where the verdict is certain, None where it is math-verify's to give. Both in canonical spelling."""
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
    if isinstance(wanted, Fraction) and isinstance(given, Fraction) and "." not in gold + answer:
        return wanted == given
    return False if _far(wanted, given) else None


def _far(a: Fraction | float, b: Fraction | float) -> bool:
    return abs(float(a) - float(b)) > _FAR * max(1.0, abs(float(a)), abs(float(b)))


def _all_far(wanted: Fraction | float, answer: str) -> bool:
    """Several numbers and none of them the gold: wrong, however a list is compared with a number."""
    if len(answer) > _LONGEST or ", " not in answer or _JOINED_AGAIN.search(answer):
        return False
    parts = answer.split(", ")
    values = [_value(part) for part in parts] if len(parts) <= _MOST_PARTS else [None]
    return all(value is not None and _far(wanted, value) for value in values)


@lru_cache(maxsize=4096)
def _value(text: str) -> Fraction | float | None:
    """The value of one number: exact where it is a fraction, else a double; None outside the grammar."""
    if len(text) > _LONGEST:
        return None
    bare = text.removeprefix("-")
    sign = -1 if bare != text else 1
    if _DECIMAL.fullmatch(bare):
        return sign * Fraction(bare.replace(",", ""))
    fraction = _FRACTION.fullmatch(bare)
    if fraction:
        value = _fraction(fraction)
        return None if value is None else sign * value
    return _sum(text)


def _fraction(match: re.Match[str]) -> Fraction | None:
    """`7/14`, `\\frac{3}{8}`, `12\\frac{3}{5}`; None where it has no value or would be a strange mixed number."""
    over, under, whole, *latex = match.groups()
    above, below = (over, under) if over is not None else [group for group in latex if group is not None]
    if not int(below):
        return None
    part = Fraction(int(above), int(below))
    if whole is None:
        return part
    return int(whole) + part if 0 < part < 1 else None


def _sum(text: str) -> float | None:
    """Terms joined by signs: `\\sqrt{34} + 3\\sqrt{10}`, `2 - \\frac{\\pi}{4}`. A double, of at most `_MOST_TERMS` terms."""
    total, place = 0.0, 0
    for number in range(_MOST_TERMS):
        sign = _SIGN.match(text, place) if number or text.startswith("-") else None
        if number and sign is None:
            return None
        place = sign.end() if sign else place
        term, place = _term(text, place)
        if term is None:
            return None
        total += -term if sign and sign[1] == "-" else term
        if place == len(text):
            return total
    return None


def _term(text: str, place: int) -> tuple[float | None, int]:
    match = _PRODUCT_OVER.match(text, place)
    below = int(match[4]) if match else 1
    match = match or _PRODUCT.match(text, place)
    if match is None or not any(match.groups()[:3]) or not below:
        return None, place
    value = float(match[1] or 1) * math.sqrt(int(match[2] or 1)) * (math.pi if match[3] else 1.0)
    end = match.end()
    while end > match.start() and text[end - 1] == " ":
        end -= 1
    return value / below, end
