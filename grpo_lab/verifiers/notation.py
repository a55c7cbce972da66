r"""Rewrite notations of numbers that LaTeX does not know into ones that it does.

    1.5e-3 -> 0.0015        1E+6 -> 1000000         5e-324 -> 5\times10^{-324}
    10⁻⁹, 10^-9 -> 10^{-9}  1.5 x 10^{-3} -> 1.5\times 10^{-3}
    0.1\overline{6}, 0.1\dot{6} -> \frac{1}{6}     0.(3) -> \frac{1}{3}, but 0.1(6) is a product
    \log_e 2 -> \ln 2       \varnothing, \{\} -> \emptyset

`2e-3` may be 0.002 or, with Euler's number, 2e - 3: `as_scientific` decides by the text that it is compared with.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

_SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
SUPERSCRIPTS = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_BARE_NEGATIVE_POWER = re.compile(r"\^\s?(-\d{1,6})(?![\d{}])")
_X_FOR_TIMES = re.compile(r"(?<=\d)\s?[xX]\s?(?=10\s?\^)")
_E = re.compile(r"(?<![\w.\\}])(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})([eE])([-+]?)(\d{1,4})(?![\w.]*\w)", re.ASCII)
_REPEATING = re.compile(
    r"(?<![\w.\\}])(\d{0,12})\.(?:(\d{0,12})(?:\\(?:overline|bar)\s?\{?(\d{1,12})\}?"
    r"|\\dot\s?\{?(\d)\}?(?:(\d{0,12})\\dot\s?\{?(\d)\}?)?)|\((\d{1,12})\))(?![\d.(])",
    re.ASCII,
)
_EMPTY_SET = re.compile(r"\\(?:varnothing|empty)(?![a-zA-Z])|^\\?\{\s*\\?\}$|∅")
_NATURAL_LOGARITHM = re.compile(r"\\log\s?_\s?(?:\{\s?e\s?\}|e(?![a-zA-Z]))")
_OPEN_TO_DOUBT = re.compile(r"([-+]?\d{1,15})e([-+]\d)", re.ASCII)
_EULER = re.compile(r"(?<![A-Za-z\\])e(?![A-Za-z])|\\(?:exp|ln|log)")
_DOTS = re.compile(r"[-+]?\d{1,3}(?:(?:\.\d{3}){2,}(?:,\d{1,20})?|(?:\.\d{3})+,\d{1,20})", re.ASCII)
_SPACES = re.compile(r"[-+]?\d{1,3}(?: \d{3})+,\d{1,20}", re.ASCII)
_UNDERSCORES = re.compile(r"[-+]?\d{1,3}(?:(?:_\d{3})+|(?:'\d{3})+)", re.ASCII)
_INDIAN = re.compile(r"[-+]?\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d{1,20})?", re.ASCII)
_MOST_ZEROS = 30


def in_latex(text: str) -> str:
    """Rewrite the notations described at the top of this module in LaTeX; an ambiguous one stays as it is."""
    text = SUPERSCRIPTS.sub(lambda power: "^{" + power[0].translate(_SMALL).lstrip("+") + "}", text)
    if "^" in text:
        text = _X_FOR_TIMES.sub(r"\\times ", _BARE_NEGATIVE_POWER.sub(r"^{\1}", text))
    if "\\" in text or "(" in text or "{" in text:
        text = _EMPTY_SET.sub(r"\\emptyset", _NATURAL_LOGARITHM.sub(r"\\ln ", _REPEATING.sub(_repeating, text)))
    if _OPEN_TO_DOUBT.fullmatch(text):
        return text
    return _E.sub(_without_e, text)


def _repeating(number: re.Match[str]) -> str:
    """Rewrite a repeating decimal, `0.1\\overline{6}`, as a fraction."""
    whole = number[1] or "0"
    before = number[2] or ""
    dotted = "".join(part for part in number.group(4, 5, 6) if part)
    repeated = number[3] or dotted or number[7]
    scale = 10 ** len(before)
    nines = 10 ** len(repeated) - 1
    value = Fraction(int(whole + before), scale) + Fraction(int(repeated), scale * nines)
    if value.denominator == 1:
        return str(value.numerator)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _without_e(number: re.Match[str]) -> str:
    """Rewrite `1.5e-3` as a decimal, or with a power of ten if it would have very many zeros."""
    mantissa, _, sign, exponent = number.groups()
    if len(exponent) > 1 and int(exponent) > _MOST_ZEROS:
        return rf"{mantissa}\times10^{{{sign.lstrip('+')}{exponent}}}"
    return f"{Decimal(f'{mantissa}e{sign}{exponent}'):f}"


def ungrouped(text: str, commas: bool) -> str:
    """Remove the digit grouping of a number: of `1.234.567`, `1.234,56`, `1 234,5`, `1_000_000`, and with `commas` also
    of `12,34,567`. Any other text stays: `1.234` is a decimal, and `12,34` a decimal or a list."""
    if _DOTS.fullmatch(text):
        return text.replace(".", "").replace(",", ".")
    if _SPACES.fullmatch(text):
        return text.replace(" ", "").replace(",", ".")
    if _UNDERSCORES.fullmatch(text):
        return text.replace("_", "").replace("'", "")
    if commas and _INDIAN.fullmatch(text):
        return text.replace(",", "")
    return text


def as_scientific(text: str, other: str, value: Fraction | None) -> str:
    """Write a `text` such as `2e-3` as the decimal 0.002, unless it means 2e - 3 with Euler's number.

    That is decided by `other`, the text that it is compared with. If that has a `value`, the nearer of both readings is
    meant; else it is Euler's number if `other` has that.
    """
    found = _OPEN_TO_DOUBT.fullmatch(text)
    if found is None or text == other:
        return text
    scientific = Decimal(text)
    euler = int(found[1]) * math.e + int(found[2])
    if value is None:
        named = _EULER.search(other) is not None and _OPEN_TO_DOUBT.fullmatch(other) is None
    else:
        named = abs(float(value) - euler) < abs(float(value) - float(scientific))
    return text if named else f"{scientific:f}"
