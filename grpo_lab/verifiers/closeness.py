r"""Make math-verify's numeric closeness relative, so that a tiny gold is not equal to everything tiny.

math-verify rounds to a number of decimals, and ignores a difference below 1e-15: beside `10^{-9}` every small number is
right. What it calls equal is checked again here, and stays equal if

    both sides are exact (`2^{-99}`)       the values agree in `_EXACT` digits
    one holds a decimal (`1.6e-19`)        they agree to six decimals; below 0.1, six from the first significant digit
    they have variables                    they agree at points of several magnitudes, in `_EXACT` digits or, if one
                                           holds a decimal, in `_NEARLY`

The check (`agree`) makes nothing equal that math-verify tells apart; only `equal_where_real` does. A decimal counts as
the fraction that it writes. Sides without a value (`f(x)`) stay equal. This module runs in a worker: it imports sympy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

_DIGITS = 60
"""Number of digits that are computed."""
_EXACT = 40
"""Number of digits in which exact sides must agree."""
_NEARLY = 12
"""Number of digits in which sides with variables and decimals must agree."""
_ZEROS_AT_MOST = 400
_MOST_SYMBOLS = 3
_MAGNITUDES = (0, -25)
_OF_POLYNOMIALS = 25
"""Powers of ten of the points at which sides with variables are compared; the last one for polynomials only."""


@contextmanager
def relative_closeness() -> Iterator[None]:
    """Make math-verify's numeric equality also require `agree` within the block, inside lists and matrices, too."""
    from math_verify import grader

    absolute = grader.sympy_numeric_eq

    def relative(gold: Any, answer: Any, float_rounding: int, numeric_precision: int) -> bool:
        return bool(absolute(gold, answer, float_rounding, numeric_precision)) and agree(gold, answer)

    grader.sympy_numeric_eq = relative
    try:
        yield
    finally:
        grader.sympy_numeric_eq = absolute


def agree(gold: Any, answer: Any) -> bool:
    """Return whether two sides that math-verify calls equal have the same value; True also if one has no value."""
    from math_verify.grader import get_pct_val
    from sympy import Expr, Float

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return True  # a matrix is judged by its entries
    decimals = gold.has(Float) or answer.has(Float)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if symbols:
        return _agree_at_points(_exact(gold), _exact(answer), symbols, decimals)
    readings = [(_value(_exact(one)), _value(_exact(other))) for one, other in _readings(gold, answer, get_pct_val)]
    return any(one is None or other is None or _same(one, other, decimals) for one, other in readings)


def _readings(gold: Any, answer: Any, without_percent: Any) -> list[tuple[Any, Any]]:
    """Return the pairs (gold, answer) of which one must agree: as given and, if one has percent signs, also without
    them, as `9%` counts as 9 beside 9. `without_percent` is math-verify's function for that."""
    bare = (without_percent(gold, gold), without_percent(answer, answer))
    if bare == (gold, answer):
        return [(gold, answer)]
    return [(gold, answer), bare]


def _exact(side: Any) -> Any:
    """Write every decimal as the fraction that it stands for."""
    from sympy import Float, Rational

    return side.xreplace({one: Rational(str(one)) for one in side.atoms(Float) if one.is_finite})


def _value(side: Any) -> Any:
    """Evaluate an expression to `_DIGITS` digits. Return 0 if none of the digits is certain, as in a difference of
    equal numbers, and None if it has no finite value in digits."""
    from sympy import Integer

    value = side.evalf(_DIGITS)
    if not value.is_number or not value.is_finite:
        return None
    parts = [part for part in value.as_real_imag() if getattr(part, "_prec", _DIGITS) > 2]
    sure = sum(part.is_Float or part.is_Rational for part in parts)
    if not parts:
        return Integer(0)
    if sure == len(parts):
        return value
    return None


def _same(gold: Any, answer: Any, decimals: bool) -> bool:
    """Return whether two numbers agree in `_EXACT` digits; with `decimals`, to six decimals, and below 0.1 to six
    digits from the first significant one of the gold."""
    apart = abs(gold - answer)
    size = abs(gold)
    if not decimals or size == 0:
        return bool(apart <= max(size, abs(answer)) / 10**_EXACT)
    zeros = 0
    while size * 10**zeros < 0.1 and zeros < _ZEROS_AT_MOST:
        zeros += 1
    return bool(apart * 10 ** (6 + zeros) <= 1)


def _agree_at_points(gold: Any, answer: Any, symbols: list[Any], decimals: bool) -> bool:
    """Return whether both sides agree at positive points of several magnitudes. The tiny term of `x + 10^{-20}` shows
    only at a tiny x."""
    from sympy import Rational

    polynomial = gold.is_polynomial(*symbols) and answer.is_polynomial(*symbols)
    digits = _NEARLY if decimals else _EXACT
    for magnitude in (*_MAGNITUDES, _OF_POLYNOMIALS) if polynomial else _MAGNITUDES:
        scale = Rational(10) ** magnitude
        point = {symbol: scale * Rational(137 + 61 * place, 101) for place, symbol in enumerate(symbols)}
        one = _value(gold.xreplace(point))
        other = _value(answer.xreplace(point))
        if one is None or other is None:
            continue
        if abs(one - other) > max(abs(one), abs(other)) / 10**digits:
            return False
    return True


def equal_where_real(gold: Any, answer: Any) -> bool:
    r"""Return whether two sides with roots or logarithms of variables are real at the same points, and equal there.

    `\sqrt{1/n}` and `1/\sqrt{n}` are, though they differ as complex numbers. `\sqrt{x^2}` and `x` are not, nor are
    `\ln x^2` and `2\ln x`. Two points are tried for every combination of the variables' signs. False if a side is no
    such expression of sympy or holds a decimal, if the variables differ or are more than `_MOST_SYMBOLS`, or if the
    sides are real at none of the points.
    """
    from sympy import Expr, Float, Rational

    if not all(isinstance(side, Expr) and _has_root(side) and not side.has(Float) for side in (gold, answer)):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not 0 < len(symbols) <= _MOST_SYMBOLS or gold.free_symbols != answer.free_symbols:
        return False
    met = False
    for signs in product((1, -1), repeat=len(symbols)):
        for size in (Rational(137, 101), Rational(29, 83)):
            point = {one: sign * (size + Rational(3 * n, 7)) for n, (one, sign) in enumerate(zip(symbols, signs))}
            values = [_value(side.xreplace(point)) for side in (gold, answer)]
            real = [value is not None and bool(value.is_real) for value in values]
            if real[0] != real[1] or (real[0] and not _same(values[0], values[1], False)):
                return False
            met = met or real[0]
    return met


def _has_root(side: Any) -> bool:
    """Return whether an expression has a root or a logarithm of a variable."""
    from sympy import Pow, log

    roots = (one for one in side.atoms(Pow) if one.exp.is_Rational and not one.exp.is_Integer)
    return any(one.free_symbols for one in (*roots, *side.atoms(log)))
