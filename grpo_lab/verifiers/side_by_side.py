r"""Prepare a gold and an answer for comparison: number words as figures, percents, one answer or many.

    gold 12000000   answer "12\text{ million}"               -> 12000000
    gold 35         answer "35.0\%"                          -> 35.0     (0.35 beside a gold of 0.35)
    gold 0.8        answer "8 out of 10"                     -> 0.8
    gold 20         answer "20 km/h"                         -> 20
    gold 5          answer "x=3 \text{ and } y=5"            -> many answers beside one

Both texts are in canonical spelling. `read_together` writes them in figures and alike; `is_many` then says whether the
answer gives several values. A gold that is text (`\text{Evelyn}`) is not for this module.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grpo_lab.verifiers.canonical import TEXT_GROUP, canonical, prose_words
from grpo_lab.verifiers.exact_numbers import is_plain_number
from grpo_lab.verifiers.notation import as_scientific, ungrouped
from grpo_lab.verifiers.quantity import exact_value, in_digits, is_value_word, read_quantity
from grpo_lab.verifiers.units import LETTER_UNITS, SPACED_UNITS, UNITS, is_unit_word

_SPACE = re.compile(r"(?<!\\)\\[ ,;:!]|~")
_TEXT_GROUP = re.compile(TEXT_GROUP)
_FIGURE = r"\d[\d,]*(?:\.\d+)?"
_SHARE = re.compile(
    rf"([+-]?{_FIGURE}|[a-z-]+)(?: [a-z]+){{0,2}}? (out of|of|in|over) "
    rf"(?:the |every |each |all |a total of )?({_FIGURE}|[a-z-]+)((?: [a-z]+){{0,3}})",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"(.*\S)\s*\\%", re.DOTALL)
_OF_WHAT = re.compile(r" of(?: [^\W\d_]+){1,6}")
_UNIT = r"(?:[A-Za-zµμ]+|\\(?:Omega|mu [A-Za-z]+))(?:\^\{?-?\d\}?)?"
_UNITS_AFTER = re.compile(rf"((?:\s*[*/]\s*|\s*\\cdot\s*|\s+per\s+|\s+){_UNIT})+")
_UNIT_NAME = re.compile(r"\\Omega|[A-Za-zµμ]+")
_LETTER_UNITS = LETTER_UNITS | {"Hz", "Pa", "per"}
_RIGHT_SIDE = re.compile(r"(?<![<>!=\\])=(?!=)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_JOINT = re.compile(
    r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])[^{}]*\}"
    r"|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|;|\\\\|\\q?quad(?![a-zA-Z])|\\(?:land|wedge|lor|vee)(?![a-zA-Z])|\\?&"
)
_NEXT_EQUATION = re.compile(  # "x = 3 while y = 5", "x=3 \\mid y=5", two lines
    r"(?<=[\d}])\s*(?:\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}|\\mid(?![a-zA-Z])|\||\s)\s*(?=[a-zA-Z](?:_\{?\w{1,8}\}?)?\s*=)"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_BRACKET = re.compile(r"[()\[\]{}]")
_BRACKETS = re.compile(r"[()\[\]]|\\[{}]|\\begin|,|;|=|<|>|\\(?:cup|cap|in|leq?|geq?|neq|pm)(?![a-zA-Z])")
_WORDS_BETWEEN = re.compile(r"\d\W{0,6}[A-Za-z]{2,}(?:[ .-]+[A-Za-z]+){0,6}[ .:$+-]*(?<![A-Za-z])\d")
#: Reason of the verdict on an answer for which `is_many` is true.
MANY = "several answers beside one"


def in_figures(text: str, letters: bool = False, unit: Fraction = Fraction(1)) -> str:
    r"""Write a quantity in words as figures, without its unit; any other text is returned as it is.

    `12\text{ million}` -> `12000000`, `two thirds` -> `\frac{2}{3}`, `8 out of 10` -> `0.8`.

    Args:
        text: a gold or an answer, in canonical spelling.
        letters: also read a letter behind a number as its scale, `5k` -> `5000`, as no variable can be meant.
        unit: what a number in words is divided by: with 12, `7 dozen` -> `7`.
    """
    flat = _flat(text)
    share = _share(flat)
    if share is not None:
        return share
    found = read_quantity(flat)
    if found is None or found.plain or (found.suffix and not letters):
        return text
    rest = flat[found.end :]
    words = rest.strip(" .").split()
    units = all(re.fullmatch(r"[^\W\d_]+\.?", word) and is_unit_word(word.strip(".")) for word in words)
    if not (units and len(words) <= 8) and not ((found.part or found.percent) and _OF_WHAT.fullmatch(rest)):
        return text
    number = flat[: found.end]
    if found.percent:
        if text.endswith(r"\%") and _is_latex(number):
            return text
        return in_digits(found.value) + r"\%"
    if _is_latex(number):
        return text
    return in_digits(found.value / unit)


def _flat(text: str) -> str:
    """Replace text groups by their words, and LaTeX's spaces by plain ones."""
    return " ".join(_SPACE.sub(" ", _TEXT_GROUP.sub(_with_spaces, text)).split())


def _with_spaces(group: re.Match[str]) -> str:
    r"""Return the inside of a matched `\text{…}` with a space on either side."""
    return f" {group[0][group[0].index('{') + 1 : -1]} "


def _is_latex(number: str) -> bool:
    r"""Return whether math-verify reads these figures by itself: `\frac{1}{2}`, `1/2`, `3\frac{1}{2}`."""
    return not re.search(r"[A-Za-z]", _COMMAND.sub("", number)) and not re.search(r"\d\s+\d", number)


def _share(flat: str) -> str | None:
    """Write the value of a share, 0.8 for `8 out of 10 apples`; None for any other text. With `of` and `in`, as in
    `1 in 5`, it is a share only if the first number is not the larger one."""
    found = _SHARE.fullmatch(flat)
    if found is None:
        return None
    some = exact_value(found[1])
    whole = exact_value(found[3])
    if some is None or not whole or (found[2].lower() in ("of", "in") and abs(some) > whole):
        return None
    if any(is_value_word(word) for word in found[4].split()):
        return None
    return in_digits(some / whole)


def read_together(gold: str, answer: str) -> tuple[str, str]:
    """Return gold and answer as they are to be compared: quantities in figures, percents as numbers beside a number.

    If the gold is a plain number, the answers `x = 18`, `12,5` and `20 km/h` are read as 18, 12.5 and 20. Lists stay
    lists.
    """
    if is_plain_number(gold):
        answer = ungrouped(answer, commas=True)
    elif is_plain_number(answer):
        gold = ungrouped(gold, commas=False)  # 12,34,567 may be a list
    spelled = (gold, answer)
    gold = as_scientific(gold, spelled[1], exact_value(spelled[1]))
    answer = as_scientific(answer, spelled[0], exact_value(spelled[0]))
    gold = _without_compound_unit(in_figures(gold))
    answer = in_figures(answer, letters=exact_value(gold.removesuffix(r"\%")) is not None)
    gold, answer = _percents(gold, answer)
    if not is_plain_number(gold):
        return gold, answer
    if "," not in _THOUSANDS.sub("", answer) and "=" in answer and len(parts_of(answer)) < 2:
        answer = _percents(gold, in_figures(canonical(_last_side(answer)), letters=True))[1]
    answer = _without_compound_unit(answer, letters=True)
    if _DECIMAL_COMMA.fullmatch(answer) and not is_plain_number(answer):
        answer = answer.replace(",", ".")
    return gold, answer


def _percents(gold: str, answer: str) -> tuple[str, str]:
    r"""Return gold and answer with percents as numbers: two percents lose their signs, and beside a number `35\%` is 35
    or 0.35 (`_nearer`)."""
    of_gold = _PERCENT.fullmatch(gold)
    of_answer = _PERCENT.fullmatch(answer)
    if of_gold and of_answer:
        return of_gold[1], of_answer[1]
    if of_answer:
        return gold, _nearer(of_answer[1], exact_value(gold)) or answer
    if of_gold:
        return _nearer(of_gold[1], exact_value(_last_side(answer))) or gold, answer
    return gold, answer


def _nearer(percent: str, other: Fraction | None) -> str | None:
    """Return `percent` (a number, written without its sign) or its hundredth, whichever is nearer to `other`. Beside a
    whole number above 1 it is always `percent`. None if one of both has no value."""
    if other is not None and other.denominator == 1 and abs(other) > 1:
        return percent  # 300% is not 3: who writes it was asked for percents
    value = exact_value(percent)
    if value is None or other is None:
        return None
    if abs(value - other) <= abs(value / 100 - other):
        return percent
    return in_digits(value / 100)


def _last_side(answer: str) -> str:
    """Return what stands behind the last equals sign; all of an answer without one."""
    return _RIGHT_SIDE.split(answer)[-1].strip()


def _without_compound_unit(text: str, letters: bool = False) -> str:
    r"""Drop a compound unit: `20 km/h` -> `20`, `5 \mathrm{m}/\mathrm{s}^2` -> `5`; with `letters` also a single
    one, `5 N`."""
    found = read_quantity(text)
    if found is None or not found.plain:
        return text
    flat = _flat(text[found.end :])
    rest = flat if flat.startswith(("/", "*")) else f" {flat}"
    spaced = text[found.end : found.end + 1] in " \\~" or (letters and "/" in rest)
    if not flat or not spaced or not _UNITS_AFTER.fullmatch(rest):
        return text
    known = UNITS | SPACED_UNITS | (_LETTER_UNITS if letters else frozenset())
    names = [name for name in _UNIT_NAME.findall(rest.replace("\\cdot", " ")) if name != "per"]
    compound = "/" in rest or "per" in rest or "cdot" in rest or letters
    fits = all(name in known or name == r"\Omega" or (letters and is_unit_word(name)) for name in names)
    if compound and fits:
        return text[: found.end]
    return text


def parts_of(answer: str) -> list[str]:
    r"""Split a text into the answers that it gives: at `and`, `or`, `;`, `\quad` and the like, and before a further
    equation, but not inside brackets. A matrix is one answer."""
    if r"\begin" in answer:
        return [answer]
    parts = []
    depth = 0
    last = 0
    inside_joint = 0
    patterns = [(_JOINT, True), (_NEXT_EQUATION, True), (_BRACKET, False)]
    marks = sorted((m.start(), m.end(), joint) for pattern, joint in patterns for m in pattern.finditer(answer))
    for start, end, joint in marks:
        if start < inside_joint:
            continue
        if joint:
            inside_joint = end
            if depth == 0:
                parts.append(answer[last:start])
                last = end
        else:
            depth += 1 if answer[start] in "([{" else -1
    parts.append(answer[last:])
    return [part.strip(" ,") for part in parts if any(map(str.isalnum, _TEXT_GROUP.sub("", part)))]


def is_many(gold: str, answer: str) -> bool:
    """Return whether the gold is one value and the answer gives several different ones, or has several numbers with
    words between them."""
    value = exact_value(gold)
    if value is None and (_BRACKETS.search(gold) or len(parts_of(gold)) > 1):
        return False
    parts = parts_of(answer)
    if len(parts) > 1:
        sides = [_last_side(part) for part in parts]
        return len({side if (number := exact_value(side)) is None else number for side in sides}) > 1
    if value is None or "=" in answer:
        return False
    bare = _COMMAND.sub("·", _TEXT_GROUP.sub(_with_spaces, answer))
    between = _WORDS_BETWEEN.search(bare)
    return between is not None and bool(prose_words(between[0]) or re.search(r"\d\s+[A-Za-z]{2,}", between[0]))
