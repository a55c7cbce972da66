r"""Tell units behind a number, which are dropped, from upright symbols, which are part of the expression.

    5\,\mathrm{m}   \sqrt{3}\text{ cm}   12 ways        a number and its unit
    3+4\mathrm{i}   \mathrm{e}^2   2\mathrm{x}          symbols, set upright: i, e, x
    \mathrm{sin}\,x   2\boldsymbol{\pi}                 a function, a constant

A single upright letter is a unit only if it abbreviates one, follows a number without variables, and is followed by
nothing but further units. `i`, `e`, `x` and `\pi` never are units. `without_upright` sets symbols as plain ones, and
`without_unit_at_end` drops units.
"""

from __future__ import annotations

import re
from itertools import product

from grpo_lab.verifiers.quantity import is_value_word

_UNITS_WORDS = (
    "m cm mm km g kg mg s h hr hrs min mins sec secs L l ml mL ft in lb lbs oz mph kmh kph usd eur dollars dollar "
    "cents cent euros pounds degrees degree deg circ units unit hours hour minutes minute seconds second days day "
    "weeks week months month years year meters meter metres miles mile feet foot inches inch"
)
UNITS = frozenset(_UNITS_WORDS.split())
# Abbreviations that could be a product of variables where they touch the number: units only after a space.
_SPACED_UNITS_WORDS = (
    "mi yd yds gal qt pt sq cu kB MB GB TB kW kWh MW Wh hp kcal cal mol kPa Pa kN Hz kHz MHz GHz atm bar psi ha am "
    "pm rpm bpm mpg dB ppm cc µm μm nm US USD dl dL cl cL cts pc pcs"
)
SPACED_UNITS = frozenset(_SPACED_UNITS_WORDS.split())
# Letters that alone abbreviate a unit: behind a plain number; set upright; set upright behind a space; and not set
# upright at the end of an expression without variables.
LETTER_UNITS = frozenset("NVJWKCFATLmshg")
_UPRIGHT_LETTERS = LETTER_UNITS | frozenset("lBHS")
_LETTERS_AFTER_A_GAP = frozenset("tdbu")
_PLAIN_LETTERS = frozenset("mshglL")
_PREFIXES = ("", "k", "M", "G", "T", "m", "c", "d", "h", "n", "p", "f", "μ", "µ")
_BASES_WORDS = "m g s N J W V A Pa Hz L l eV mol C F T H K cal B Wh Ah bar rad sr lm lx cd Bq Gy Sv"
_SI = frozenset(prefix + base for prefix, base in product(_PREFIXES, _BASES_WORDS.split()))
UPRIGHT_UNITS = UNITS | SPACED_UNITS | _SI
_FUNCTIONS_WORDS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp max min gcd lcm mod det dim ker deg arg "
    "inf sup lim sqrt frac infty and or pi circ pmatrix bmatrix vmatrix matrix array cases begin end"
)
FUNCTIONS = frozenset(_FUNCTIONS_WORDS.split())
_LOOKED_AT = 200  # characters that are read around a letter, so that the time on hostile text stays linear
_COMMANDS_WORDS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min det pi"
_COMMANDS_OF_FUNCTIONS = frozenset(_COMMANDS_WORDS.split())
_NEVER_TEXT = frozenset(["e", "i", r"\pi"])
_MATHS = r"operatorname\*?|math(?:rm|it|bf|sf|tt|normal|up)|boldsymbol|bm|rm|bf|it"
_WORDS = r"text(?:rm|it|bf|sf|normal|up)?|mbox|hbox"
_SWITCHED = re.compile(r"\{\s*\\(rm|bf|it)\s+(\\?[A-Za-z]{1,12})\s*\}")
_UPRIGHT = re.compile(
    rf"\\(?:(?P<maths>{_MATHS})|(?:{_WORDS}))"
    r"(?:\s*\{(?P<inside>\s*\\?[A-Za-z]{1,12}\s*)\}|\s+(?P<bare>[A-Za-z])(?![A-Za-z]))"
)
_GAP = r"(?:[\s~]|\\[ ,;:!])"
_GAP_AT_END = re.compile(rf"{_GAP}+$")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_COMMAND_AT_END = re.compile(r"\\[A-Za-z]+$")
_LETTER = re.compile(r"[A-Za-z]")
_NUMBER_ENDS = re.compile(r"(?:[\d})\]!]|\\pi\s?)$")
_SUM = re.compile(r"[\d}\s][+-]")
_PART_OF_LIST = re.compile(r"[=,;(\[]")
_NOTHING_BUT_UNITS = re.compile(rf"{_GAP}*(?:$|[\^/.,;)\]=]|\\cdot(?![a-z])|\\(?:text|math|mbox))")
_BETWEEN_UNITS = re.compile(rf"(?:\^\{{?-?\d\}}?)?{_GAP}*(?:[/*]|\\cdot(?![a-z]))?{_GAP}*")
_UNIT_BEFORE = re.compile(rf"{_GAP}*(?:[/*]|\\cdot){_GAP}*$")
_TEXT_AT_END = re.compile(
    rf"(.*[^\s=<>(,+^_-]){_GAP}*\\(?:{_MATHS}|{_WORDS})\s*\{{[^{{}}]*\}}(?:\^\{{?-?\d\}}?)?", re.DOTALL
)
_WORDS_AT_END = re.compile(
    rf"(?P<value>.*(?:[\d}})\]!]|\\pi(?![a-zA-Z])))(?P<gap>{_GAP}*)"
    r"(?P<words>[A-Za-zµμ]+\.?(?: [A-Za-zµμ]+\.?){0,5})(?:\^\{?\d\}?)?",
    re.DOTALL,
)


def is_unit_word(word: str) -> bool:
    """Return whether a word behind a number may be its unit, or what it counts. It is a known unit, or any word of at
    least three letters that is no function and does not say how much (`million`)."""
    if word in UNITS or word in SPACED_UNITS:
        return True
    return len(word) >= 3 and word.lower() not in FUNCTIONS and not says_how_much(word)


def says_how_much(word: str) -> bool:
    """Return whether a word behind figures belongs to the number: `million`, `dozen`, `thirds`. `quarters` does not:
    they are coins."""
    return is_value_word(word) and word.lower() not in ("quarter", "quarters")


def without_upright(text: str) -> str:
    r"""Replace upright symbols by plain ones: `3+4\mathrm{i}` -> `3+4i`, `\mathrm{sin}\,x` -> `\sin \,x`. Units and
    text stay as they are: `5\mathrm{m}`, `\text{(C)}`."""
    if "\\" not in text:
        return text
    return _UPRIGHT.sub(_read_upright, _SWITCHED.sub(r"\\math\1{\2}", text))


def _read_upright(group: re.Match[str]) -> str:
    """Return what replaces a matched upright group: its symbol or command, or the group itself if it is a unit or
    text."""
    raw = group["inside"] or group["bare"]
    name = raw.strip()
    whole = group.end() - group.start() == len(group.string)
    if whole:
        if group["maths"] and name in _NEVER_TEXT:
            return name
        return group[0]
    before = group.string[max(0, group.start() - _LOOKED_AT) : group.start()]
    after = group.string[group.end() : group.end() + _LOOKED_AT]
    if name in _COMMANDS_OF_FUNCTIONS:
        return rf"\{name} "
    if name.startswith("\\"):
        return f"{name} "
    if len(name) == 1:
        symbols = not _unit_can_stand(name, before, after, raw[0] == " ")
    else:
        symbols = len(name) == 2 and bool(group["maths"]) and name not in UPRIGHT_UNITS | FUNCTIONS
    if not symbols:
        return group[0]
    if _COMMAND_AT_END.search(before):
        return f" {name}"
    return name


def _unit_can_stand(letter: str, before: str, after: str, gap: bool) -> bool:
    """Return whether a single upright letter between the texts `before` and `after` is a unit. `gap`: a space stands
    before the letter inside its group."""
    value = _GAP_AT_END.sub("", before)
    gap = gap or value != before
    if letter not in (_UPRIGHT_LETTERS | _LETTERS_AFTER_A_GAP if gap else _UPRIGHT_LETTERS):
        return False
    if not _NOTHING_BUT_UNITS.match(after):
        return False
    if _ends_in_unit(value):
        return True  # the second unit of `5\mathrm{m}/\mathrm{s}`
    if value.endswith((")", "]")):
        own = value
    else:
        own = _PART_OF_LIST.split(value)[-1]
    if not _NUMBER_ENDS.search(own) or _LETTER.search(_COMMAND.sub("", own)):
        return False
    return gap or value.endswith(")") or not _SUM.search(own)


def _ends_in_unit(value: str) -> bool:
    r"""Return whether a text ends in an upright unit and a sign that joins it to the next one: `5\mathrm{m}/`."""
    last = max(value.rfind("\\math"), value.rfind("\\text"), value.rfind("\\mbox"))
    found = None
    if last >= 0:
        found = _UPRIGHT.match(value, last)
    name = ""
    if found:
        name = (found["inside"] or found["bare"]).strip()
    return found is not None and name in UPRIGHT_UNITS and _BETWEEN_UNITS.fullmatch(value, found.end()) is not None


def without_unit_at_end(expression: str, letters: bool = False) -> str:
    r"""Drop a unit at the end: `\sqrt{3}\text{ cm}^2` -> `\sqrt{3}`, `\frac{1}{2} hours` -> `\frac{1}{2}`;
    `\frac{x}{2} c` and `2t` stay.

    `letters`: no variable can be meant, so a single letter behind a space is dropped, too: `\sqrt{3} m`.
    """
    if len(expression) > 2 * _LOOKED_AT:
        return expression
    if text := _TEXT_AT_END.fullmatch(expression):
        value = _UNIT_BEFORE.sub("", text[1])
        if value.endswith("}"):
            return without_unit_at_end(value)
        return value
    found = _WORDS_AT_END.fullmatch(expression)
    if found is None:
        return expression
    words = [word.rstrip(".") for word in found["words"].split()]
    if len(words) == 1 and (not found["gap"] or len(words[0]) == 1):
        word = words[0]
        if len(word) == 1:
            unit = word in _PLAIN_LETTERS and letters and found["gap"]
        else:
            unit = word in UPRIGHT_UNITS
        if unit:
            return found["value"]
        return expression
    units = all(is_unit_word(word) and len(word) > 1 for word in words)
    if units:
        return found["value"]
    return expression
