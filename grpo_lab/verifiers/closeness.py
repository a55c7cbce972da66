r"""Make math-verify's numeric closeness relative, so that a tiny gold is not equal to everything tiny.

math-verify rounds to a number of decimals, and ignores a difference below 1e-15: beside `10^{-9}` every small number is
right. What it calls equal is checked again here, and stays equal if

    both sides are exact (`2^{-99}`)       the values agree in `_EXACT` digits
    one holds a decimal (`1.6e-19`)        they agree to six decimals; below 0.1, six from the first significant digit
    they have variables                    they agree in this way at points of several magnitudes

This check makes nothing equal. A decimal counts as the fraction that it writes. What has no value (`f(x)`) stays as
judged. It runs in a worker: it imports sympy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

_DIGITS = 60
_EXACT = 40
_NEARLY = 12
"""Numbers of digits: those that are computed, those in which exact sides must agree, and those for sides with variables
and decimals."""
_ZEROS_AT_MOST = 400
_MOST_SYMBOLS = 3
_MAGNITUDES = (0, -25)
_OF_POLYNOMIALS = 25


@contextmanager
def relative_closeness() -> Iterator[None]:
    """Within the block, math-verify's numeric equality also requires `agree`, inside lists and matrices, too."""
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
    """Return whether two sides that math-verify calls equal have the same value; True if they have none."""
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
    """Return the pair (gold, answer) and, if one has percent signs, the pair without them too: beside 9, `9%` is 9."""
    bare = (without_percent(gold, gold), without_percent(answer, answer))
    if bare == (gold, answer):
        return [(gold, answer)]
    return [(gold, answer), bare]


def _exact(side: Any) -> Any:
    """Write every decimal as the fraction that it stands for."""
    from sympy import Float, Rational

    return side.xreplace({one: Rational(str(one)) for one in side.atoms(Float) if one.is_finite})


def _value(side: Any) -> Any:
    """Evaluate to `_DIGITS` digits; zero if none of them is certain, None if it is no number."""
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
    apart = abs(gold - answer)
    size = abs(gold)
    if not decimals or size == 0:
        return bool(apart <= max(size, abs(answer)) / 10**_EXACT)
    zeros = 0
    while size * 10**zeros < 0.1 and zeros < _ZEROS_AT_MOST:
        zeros += 1
    return bool(apart * 10 ** (6 + zeros) <= 1)


def _agree_at_points(gold: Any, answer: Any, symbols: list[Any], decimals: bool) -> bool:
    """Return whether both sides agree at positive points of several magnitudes. A tiny term (`x + 10^{-20}`) shows
    only if the others are tiny."""
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
    r"""Return whether roots or logarithms of variables are equal wherever they are real numbers, and real at the
    same points. So are `\sqrt{1/n}` and `1/\sqrt{n}`, which complex numbers tell apart; not `\sqrt{x^2}` and `x`,
    nor `\ln x^2` and `2\ln x`."""
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
    from sympy import Pow, log

    roots = (one for one in side.atoms(Pow) if one.exp.is_Rational and not one.exp.is_Integer)
    return any(one.free_symbols for one in (*roots, *side.atoms(log)))
