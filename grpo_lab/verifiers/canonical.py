r"""Rewrite an answer in canonical spelling: unicode as LaTeX; without wrappers, currency, separators and units.

    "**$\boxed{1{,}234}$.**" -> "1,234"        "−3½ kg" -> "-3\frac{1}{2}"        "\text{Evelyn}." -> "\text{Evelyn}"

`canonical` does it in the order: signs of Unicode, wrappers from the outside in (`_peel_once`), notations of LaTeX,
currency, separators of digits, and the unit behind a number (`_without_unit`). Nothing is evaluated here, and two
answers that mean different things keep different spellings. The time is linear in the length of the answer.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from grpo_lab.verifiers.notation import SUPERSCRIPTS, in_latex
from grpo_lab.verifiers.quantity import value_of_sign
from grpo_lab.verifiers.units import FUNCTIONS, UNITS, is_unit_word, says_how_much, without_upright

_COMMAND_SIGNS, _COMMAND_NAMES = (
    "×⋅·∙π∞≤≥≠≈±∪∩∈∅Ωθαβ",
    "times cdot cdot cdot pi infty leq geq neq approx pm cup cap in emptyset Omega theta alpha beta",
)
_FRACTIONS = {sign: value_of_sign(sign) for sign in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_TRANSLATION = str.maketrans(
    {
        **dict.fromkeys("−–—‒―﹣－˗", "-"),
        **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u061c", ""),
        **dict.fromkeys("“”„‟", '"'),
        **dict.fromkeys("‘’‚‛′", "'"),
        **{sign: rf"\{name} " for sign, name in zip(_COMMAND_SIGNS, _COMMAND_NAMES.split(), strict=True)},
        **dict(zip("÷⁄∕％٪٫٬。、", "///%%.,.,", strict=True)),
        **dict.fromkeys("°º", r"^\circ "),
        "℃": r"^\circ C",
        "℉": r"^\circ F",
        "√": r"\sqrt",
        **{sign: rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for sign, value in _FRACTIONS.items()},
    }
)
CURRENCY = "$€£¥₹₽₩₫฿₺₦₱₴¢"
_SQRT_OF_DIGITS = re.compile(r"\\sqrt\s*(\d+)(?![\d}])")
_SQRT_OF_PARENS = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_BOX_HEAD = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_TEXT_HEAD = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|bf|rm)\s*\{")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_WRAPPING = (("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ('"', '"'), ("'", "'"), ("``", "``"))
_THOUSANDS_SPACE = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_THOUSANDS_TIE = re.compile(r"(?<=\d)(?:~|\\ )(?=\d{3}(?!\d))")
_NEGATIVE_SPACE = re.compile(r"(?<=\d),?\\!\s*,?\s*(?=\d{3}(?!\d))|(?<=\d)\\[,;:](?=\d{3}(?!\d))")
_SIGNED_CURRENCY = re.compile(rf"([+-]?)\s*(?:US|USD|Rs\.?)?\s*(?:\\\$|[{re.escape(CURRENCY)}])\s*(?=[-+.\d\\])")
_MIXED = re.compile(r"([+-]?\d+)\s+(\d+)\s*/\s*(\d+)")
_LEADING_ZERO_COMMA = re.compile(r"[+-]?0,\d+")
_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_GAP = r"(?:[\s~]|\\[ ,;:!])*"
_NUMBER_THEN_UNIT = re.compile(rf"({_NUMBER}(?<=\d)){_GAP}\\?([^\W\d_]{{1,12}})((?:\^\{{?\d\}}?)?)")
_DEGREES = re.compile(
    rf"({_NUMBER}(?<=\d)){_GAP}(?:\^\s*(?:\\circ|\{{\s*\\circ\s*\}})|\\degrees?(?![a-z])){_GAP}"
    r"(?:(?:\\(?:text|mathrm|rm|textrm|mbox)\s*\{)?\s*(?:[FCK]|Fahrenheit|Celsius|Kelvin)\s*\}?)?",
    re.IGNORECASE,
)
_NUMBER_THEN_TEXT = re.compile(
    rf"({_NUMBER}(?<=\d)){_GAP}\\(?:text|mbox|mathrm|textrm|textbf|textnormal)\s*\{{([^{{}}\d]*)\}}((?:\^\{{?\d\}}?)?)"
)
_PERCENT_WORD = re.compile(rf"{_GAP}(?:\\?%|percent|percentage(?: points?)?|pct|per cent){_GAP}\.?", re.IGNORECASE)
_PERCENT_AT_END = re.compile(rf"(?<=[\d}}]){_GAP}(?:\\%|percent(?:age points?)?|pct|per cent)$", re.IGNORECASE)
_TIME_OF_DAY = re.compile(r"(?<=\d)\s*[ap]\.\s?m\.?$", re.IGNORECASE)
_NUMBER_THEN_WORDS = re.compile(
    rf"({_NUMBER}(?<=\d)(?:/\d+)?) ([^\W\d_]{{1,20}}\.?(?: [^\W\d_]{{1,20}}\.?){{0,5}})(?:\^\{{?\d\}}?)?"
)
# math-verify reads `\cos 2t` as cos(2) and `\sin t` not at all: give it the parentheses.
_FUNCTION_OF = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc|log|ln))\s*(?:\^\s*(?:\{(\d+)\}|(\d)))?\s*(\d*\s?(?:\\theta|\\alpha|\\beta|\\pi|[a-zA-Z]))(?![a-zA-Z({_^])"
)
TEXT_GROUP = _TEXT_HEAD.pattern + r"[^{}]*\}"
_GROUP_OF_TEXT = re.compile(TEXT_GROUP)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]+")
_NAME_WITH_AND = re.compile(r"[A-Za-z]\\?&[A-Za-z]")  # M&Ms, A&W; in a matrix a mark
_SMALL_WORDS_WORDS = (
    "is of to it the for he she by at per all not are was has his her its they be as we so if an on my no yes you "
    "am pm km kg cm mm mph one two six ten day men cup"
)
_SMALL_WORDS = frozenset(_SMALL_WORDS_WORDS.split())


def group_end(text: str, open_brace: int) -> int:
    """Return the index just behind the `}` that closes the `{` at `open_brace`; -1 if nothing closes it. Escaped braces
    (`\\{`) do not count."""
    depth = 0
    for brace in _BRACE.finditer(text, open_brace):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.end()
    return -1


def _whole_group(text: str, head: re.Pattern[str]) -> str | None:
    """Return the inside of `\\command{...}` if that is all of the text; else None. `head` matches `\\command{`."""
    match = head.match(text)
    if match and text.endswith("}") and group_end(text, match.end() - 1) == len(text):
        return text[match.end() : -1]
    return None


def _peel_once(text: str) -> str:
    """Remove white space and punctuation at the ends, then one wrapper: delimiters of a formula, Markdown, quotes, a
    box, upright letters around a number, or brackets around one answer."""
    text = text.strip()
    while text.endswith("\\") and not text.endswith("\\\\"):
        text = text[:-1].rstrip()  # a lone backslash at the end is what is left of a cut command
    if not text.endswith(("\\,", "\\;", "\\:")):
        text = text.rstrip(".,;:")
    else:
        text = text[:-2]
    for left, right in _DELIMITERS + _WRAPPING:
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
            inside = text[len(left) : len(text) - len(right)]
            if right not in inside:
                return inside
    boxed = _whole_group(text, _BOX_HEAD)
    if boxed is not None:
        return boxed
    words = inside_text_group(text)
    if words is not None and re.match(r"\s*[-+$\\]*\.?\d", words) and not re.search(r"[^\W\d_]", words):
        return words  # \text{18}: a number in upright letters
    if text.startswith("[") and text.endswith("]") and not any(c in text[1:-1] for c in "[],;"):
        return text[1:-1]  # [18]: an answer in brackets, not a list or an interval
    if text.startswith(r"\displaystyle"):
        return text[len(r"\displaystyle") :]
    return text


def _with_parentheses(function: re.Match[str]) -> str:
    """Rewrite a match of `_FUNCTION_OF` with parentheses around the argument: `\\sin^2 t` as `\\sin^{2}(t)`."""
    name, braced_power, power, argument = function.groups()
    exponent = ""
    if braced_power or power:
        exponent = f"^{{{braced_power or power}}}"
    return f"{name}{exponent}({argument.strip()})"


def _without_unit(text: str) -> str:
    """Drop the unit behind a number: `18 km^2`, `18\\text{ cents}` -> `18`; `28 percent` -> `28\\%`."""
    for pattern in (_NUMBER_THEN_TEXT, _NUMBER_THEN_UNIT):
        if match := pattern.fullmatch(text):
            number, unit, _ = match.groups()
            if _PERCENT_WORD.fullmatch(unit):
                return number + r"\%"
            if pattern is _NUMBER_THEN_TEXT and not any(says_how_much(word) for word in _WORD.findall(unit)):
                return number
            if pattern is _NUMBER_THEN_UNIT and (unit in UNITS or (len(unit) > 1 and unit.lower() in UNITS)):
                return number
    if degrees := _DEGREES.fullmatch(text):
        return degrees[1]
    counted = _NUMBER_THEN_WORDS.fullmatch(text)
    named = counted and all(is_unit_word(word.rstrip(".")) for word in counted[2].split())
    if counted and named:
        return counted[1]
    return text


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """Return the canonical spelling described at the top of this module."""
    if not text.isascii():
        text = in_latex(text)
        text = "".join(chr(ord(c) - 0xFEE0) if "！" <= c <= "～" else c for c in text).translate(_TRANSLATION)
        text = "".join(str(unicodedata.digit(c)) if not c.isascii() and c.isdecimal() else c for c in text)
        text = _SQRT_OF_PARENS.sub(r"\\sqrt{\1}", _SQRT_OF_DIGITS.sub(r"\\sqrt{\1}", text))
    for _ in range(12):
        peeled = _peel_once(text)
        if peeled == text:
            break
        text = peeled
    text = in_latex(" ".join(text.split()))
    text = _NEGATIVE_SPACE.sub("", text.replace("{,}", ","))
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = _FUNCTION_OF.sub(_with_parentheses, without_upright(text))
    text = re.sub(r"(?<!\\)%", r"\\%", text)
    if _SIGNED_CURRENCY.match(text):
        text = _SIGNED_CURRENCY.sub(r"\1", text)
    if text[-1:] in CURRENCY[1:]:
        text = text.rstrip(CURRENCY.replace("$", "")).rstrip()
    text = re.sub(r"^([+-]?\d[\d,.]*)\s*\\?\$$", r"\1", text)
    text = re.sub(r"^\+\s?(?=[.\d])", "", text)
    text = _THOUSANDS_TIE.sub(" ", text)
    if _THOUSANDS_SPACE.fullmatch(text):
        text = text.replace(" ", "")
    if _LEADING_ZERO_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    text = _TIME_OF_DAY.sub("", _PERCENT_AT_END.sub(r"\\%", text))
    return _without_unit(text)


def prose_words(text: str) -> list[str]:
    r"""Return the words of a text that are prose.

    Not counted are what is in `\text{}`, commands, names of functions, `and`, `or`, and ASCII words of up to three
    letters that are no common English words (`_SMALL_WORDS`), since they may be variables. Of a name with `&`, such as
    `A&W`, the letters beside the `&` are returned.
    """
    bare = SUPERSCRIPTS.sub(" ", _COMMAND.sub(" ", _GROUP_OF_TEXT.sub(" ", text)))
    names = []
    if r"\begin" not in text:
        names = _NAME_WITH_AND.findall(bare)
    words = [word for word in _WORD.findall(bare) if word.lower() not in FUNCTIONS]
    return names + [word for word in words if len(word) > 3 or word.lower() in _SMALL_WORDS or not word.isascii()]


def inside_text_group(canonical_text: str) -> str | None:
    r"""Return the words in `\text{...}` if that is all of a canonical text; else None."""
    return _whole_group(canonical_text, _TEXT_HEAD)


def text_key(canonical_text: str) -> str:
    """Return the key by which two text answers are compared: letters and digits only, without case."""
    bare = _TEXT_HEAD.sub("", canonical_text)
    return "".join(c for c in bare if c.isalnum()).casefold()
