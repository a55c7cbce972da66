"""Rewrite arithmetic, as people and models write it, into one plain form that the expression parser reads.

What cannot be rewritten is replaced by the sign ``§``, which counts as a word, and an operator that ties it to what
follows. So ``17 mod 5 = 2`` is not judged at all; without the tie it would be judged as ``5 = 2``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from grpo_lab.verifiers.quantity import value_of_sign

ABOUT = "≈"
_NOT_READ = " § *"
"""What stands for arithmetic that cannot be rewritten; the operator ties it to what follows."""
_SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_DIVIDED = re.compile(
    r"(?<![\d./*+\-^)] )(?<![\d./*+\-^)])(\d{1,9}) ?/ ?(\d{1,9}) ?= ?(\d{1,9}),? ?"
    r"(?:with |and )?(?:a )?(?:remainder(?: of| is)?|rem\.?|[rR])[ :=]{0,2}(\d{1,9})(?![\d.])"
)


def _vulgar(match: re.Match[str]) -> str:
    """Rewrite ``3½`` as (3+1/2)."""
    whole = match[1]
    part = value_of_sign(match[2])
    if whole:
        return f"({whole}+{part})"
    return f"({part})"


def _mixed(match: re.Match[str]) -> str:
    """Rewrite the mixed number ``3 1/2`` as (3+1/2); ``3 5/2`` is none and stays."""
    whole, top, bottom = match.groups()
    if int(top) < int(bottom):
        return f"({whole}+{top}/{bottom})"
    return match[0]


def _root(match: re.Match[str]) -> str:
    """Rewrite the square root of a square number, ``√16``, as (4)."""
    root = math.isqrt(int(match[1]))
    if root * root == int(match[1]):
        return f"({root})"
    return _NOT_READ


def _factorial(match: re.Match[str]) -> str:
    """Rewrite ``5!`` as (120), up to 20!."""
    if int(match[1]) <= 20:
        return f"({math.factorial(int(match[1]))})"
    return _NOT_READ


def _remainder(match: re.Match[str]) -> str:
    """Rewrite ``17 / 5 = 3 remainder 2`` as 17 = 3*5+2, unless the remainder is not smaller than the divisor."""
    number, divisor, quotient, rest = match.groups()
    if int(rest) < int(divisor):
        return f"{number} = {quotient}*{divisor}+{rest}"
    return _NOT_READ


#: Patterns and what replaces them, applied in this order: later ones rely on what earlier ones have rewritten.
_FORMS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"[^\S\n]+"), " "),
    (re.compile(r"\\(?:left|right|,|;|!|quad|displaystyle)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:text|mathrm)\{([^{}]{0,60})\}"), r" \1 "),
    (re.compile(r"\\boxed\{([^{}]{1,60})\}"), r" \1 "),
    (re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^\n]{1,200}?)(?<=[^\s*])\*\*(?![\w(*])"), r"\1"),
    (re.compile(r"(\d) ?\\[dt]?frac ?\{(\d{1,6})\} ?\{(\d{1,6})\}"), r"\1 \2/\3"),
    (re.compile(r"\\[dt]?frac ?\{([^{}]{1,60})\} ?\{([^{}]{1,60})\}"), r"((\1)/(\2))"),
    (re.compile(r"\\[dt]?frac ?(\d)(\d)(?!\d)"), r"((\1)/(\2))"),
    (re.compile(r"\\(?:times|cdot)(?![a-zA-Z])|[×⋅·∙]"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])|÷"), "/"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"—|→|⇒|=>|->|\\(?:right|Right)arrow(?![a-zA-Z])"), " ; "),
    (re.compile(r"≈|≅|≃|~=|\\approx(?![a-zA-Z])|\\simeq(?![a-zA-Z])"), f"= {ABOUT} "),
    (re.compile(r"(\$[^=;\n]{1,60}= ?)(\d[\d.]{0,10}) ?(?:cents?\b|¢)"), r"\1(\2/100)"),
    (re.compile(r"°|\^ ?\\circ|\^ ?\{\\circ\}"), ""),
    (re.compile(r"\\?\$|[€£]|\\\(|\\\)|\\\[|\\\]|&"), ""),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?m)^ ?(?:[-*] (?=\d)|• |\d{1,2}\) (?=[\d(]))"), ""),
    (re.compile(r"(?<=[a-zA-Z])[²³](?![⁰¹²³⁴⁵⁶⁷⁸⁹])"), ""),
    (re.compile(r"(?<![⁰¹²³⁴⁵⁶⁷⁸⁹⁻\]])(?:√|\\?\bsqrt) ?[({]? ?(\d{1,12}) ?[)}]?(?![\d.])"), _root),
    (re.compile(r"[√∛∜]|\\?\bsqrt(?![a-zA-Z])"), _NOT_READ),
    (re.compile(r"(?<=[\d)}])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{1,4}"), lambda match: "^" + match[0].translate(_SMALL)),
    (re.compile(r"(?<![\d.])(\d{1,9})? ?([½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])"), _vulgar),
    (re.compile(r"(?<![\d.] )(?<![\d./^])(\d{1,9}) (\d{1,3})/(\d{1,3})(?![\d./^])"), _mixed),
    (re.compile(r"(?<![\d./])(\d{1,9}) and \(?(\d{1,3})/(\d{1,3})\)?(?! ?[=\d./])"), _mixed),
    (re.compile(r"/ (\d{1,6}/\d{1,6})(?![\d./])"), r"/ (\1)"),
    (re.compile(r"(?<![\d.])(\d{1,2})!(?!=) ?(?=[=*/+\-)])"), _factorial),
    (re.compile(r"(?<=\d)!(?!=)"), f"{_NOT_READ} "),
    (_DIVIDED, _remainder),
    (re.compile(r"= ?(\d{1,9})(?=[^=;\n]{0,20}\bremainder\b)"), rf"= {_NOT_READ} \1"),
    (re.compile(r"(?<![\d.%])(\d[\d.]{0,15}) ?[-+] ?(?=\d[\d.]{0,15} ?\\?%(?! of\b))"), _NOT_READ),
    (re.compile(r"(\d[\d.]{0,15}) ?\\?% of (?=[\d(])"), r"(\1/100)*"),
    (re.compile(r"(?<![\d./=] )(?<![\d./=])(\d{1,6} ?/ ?\d{1,6}) of (?=[\d(])"), r"(\1)*"),
    (re.compile(r"\b(?:of|mod|percent)(?: (?:the|all|his|her|its|their|these|those))? (?=[\d(])"), _NOT_READ),
    (re.compile(r"(\d[\d.]{0,15}) ?\\?%(?! ?\d)"), r"(\1/100)"),
    (re.compile(r"(?<=\d) ?\\?%(?= ?\d)"), _NOT_READ),
    (re.compile(r"(?<=\d)(?::| : |,)(?=\d)"), _NOT_READ),
    (re.compile(r"(?<=[\d)\s])[xX] ?(?=[\d.(])"), " * "),
    (re.compile(r"(\d) ([a-z]{1,20})(?= ?[-+] ?\d[\d.]{0,15} \2\b)"), r"\1"),
    (re.compile(r"([-+*/] ?\d[\d.]{0,15}) ([a-z]{1,19}?)s? ?=(?= ?-?\d[\d.]{0,15} \2s?\b)"), r"\1 ="),
]


def plain(text: str) -> str:
    """Return ``text`` with its arithmetic in the plain form that ``arithmetic.value_of`` reads."""
    for pattern, form in _FORMS:
        text = pattern.sub(form, text)
    return text
