r"""Read numbers as running text writes them: figures with scale words, number words, fractions in words.

    "12 million"  "1.5 billion"  "3 dozen"  "5k"  "two hundred and five"  "half a million"  "3 and a half"  "two-thirds"

A number is read from a place in a text as far as it goes, at most `_MOST_WORDS` words. What follows is left to the
caller.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

_ONES_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_ONES = {word: n for n, word in enumerate(_ONES_WORDS.split())}
_TENS_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {word: 10 * n for n, word in enumerate(_TENS_WORDS.split(), 2)}
_TENS["fourty"] = 40
#: Scale words, with their power of ten.
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "quadrillion": 15, "lakh": 5, "crore": 7}
_POWERS |= {"mn": 6, "mln": 6, "bn": 9, "bln": 9, "tn": 12, "lac": 5}
_COUNTS = {"dozen": 12, "score": 20, "gross": 144}
_PARTS_WORDS = "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
#: Fraction words, with their denominator.
_PARTS = {word: n for n, word in enumerate(_PARTS_WORDS.split(), 3)}
_PARTS |= {"half": 2, "halve": 2, "quarter": 4, "twentieth": 20}
_PARTS |= {"hundredth": 100, "thousandth": 1000, "millionth": 10**6}
_SUFFIXES = {"k": 3, "m": 6, "b": 9, "t": 12}
_MOST_WORDS = 24

_FIGURE = re.compile(
    r"(?:\d{1,3}(?:,\d{3}){1,12}(?!\d)|\d{1,40}(?!\d))(?:\.\d{1,40}(?!\d))?|\.\d{1,40}(?!\d)", re.ASCII
)
_SIGN = re.compile(r"(?:([-−–])|(?:minus|negative)\b)\s*", re.IGNORECASE)
_CURRENCY = re.compile(r"(?:US|USD|Rs\.?)?\s*\\?[$€£¥₹₽₩₫฿₺₦₱₴]\s*")
_OVER = re.compile(r"\s?/\s?(\d{1,18})(?!\d|[/.,]\d)", re.ASCII)
_MIXED = re.compile(
    r"(?:\s{1,4}(?:and\s{1,4})?|-)(\d{1,18})\s?[/⁄]\s?(\d{1,18})(?![\d/])|\s{0,4}\\[dtc]?frac(?:\{(\d{1,18})\}\{(\d{1,18})\}|(\d)(\d))",
    re.ASCII,
)
_VULGAR = re.compile(r"\s?([¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s?(?:\{(\d{1,18})\}\s?\{(\d{1,18})\}|(\d)(\d))", re.ASCII)
_SUFFIX = re.compile(r"(?:[kK]|MM?|[BT])(?![A-Za-z\d])")
_MONEY_SUFFIX = re.compile(r"\s?(?:mm?|[kbt])(?![A-Za-z\d])", re.IGNORECASE)
_WORD = re.compile(r"(?:[\s~]|\\[ ,;:!]|-(?=[A-Za-z])){0,4}([A-Za-z]+)")
_PERCENT = re.compile(r"(?:[\s~]|\\[ ,;:!])*(?:\\?[%％]|percent(?:age points?)?\b|per cent\b|pct\b)", re.IGNORECASE)
_AND_A_PART = re.compile(r"\s+(?:(a|an|one|1)|(two|three|2|3))\s+(half|thirds?|quarters?|fourths?)\b", re.IGNORECASE)
_NEXT_GROUP = re.compile(
    rf"(?:\s+|,\s?)(?:and\s+)?({_FIGURE.pattern})(?=\s+(?:hundred|thousand|million|billion)\b)",
    re.ASCII | re.IGNORECASE,
)
_OF_A = re.compile(r"\s+(?:of\s+)?(?:a|an)\s+(?=[A-Za-z])", re.IGNORECASE)

VALUE_WORDS = frozenset({*_ONES, *_TENS, *_POWERS, *_COUNTS, *_PARTS, "hundred", "halves", "minus", "negative"})
"""Words that may be part of a number."""


@dataclass(frozen=True)
class Quantity:
    """A number that was read from a text.

    Attributes:
        value: the number itself; 35 for `35%`.
        end: index in the text behind its last character.
        plain: whether it is written in figures alone, as `1,234.5`.
        percent: whether a percent sign or word follows.
        part: whether it ends in a fraction word, as `two thirds`.
        suffix: whether it ends in a letter, as `5k`, which in a formula would be a variable.
    """

    value: Fraction
    end: int
    plain: bool = False
    percent: bool = False
    part: bool = False
    suffix: bool = False


def value_of_sign(sign: str) -> Fraction:
    """Return the value of a fraction sign: 1/2 of `½`."""
    return Fraction(unicodedata.numeric(sign)).limit_denominator(8)


def is_value_word(word: str) -> bool:
    """Return whether a word belongs to a number and is no unit: `million`, `dozen`, `thirds`."""
    word = word.lower()
    return word in VALUE_WORDS or word.removesuffix("s") in VALUE_WORDS


def read_quantity(text: str, start: int = 0) -> Quantity | None:
    """Return the quantity that begins at index `start`, read as far as it goes; None if none begins there."""
    sign = _SIGN.match(text, start)
    begin = sign.end() if sign else start
    money = _CURRENCY.match(text, begin)
    if money:
        begin = money.end()
    found = _from_figures(text, begin, money is not None)
    if found is None and _WORD.match(text, begin):
        found = _Reader(text, None, begin, False).read()
    if found is None or found.end == begin:
        return None
    percent = _PERCENT.match(text, found.end)
    value = -found.value if sign else found.value
    end = percent.end() if percent else found.end
    plain = found.plain and percent is None and (sign is None or sign[1] is not None)
    return replace(found, value=value, end=end, plain=plain, percent=percent is not None)


def exact_value(text: str) -> Fraction | None:
    """Return the value of a text that is one quantity and nothing else; None for any other text, and for a quantity
    with a percent sign (`35%`) or a letter (`5k`) at its end."""
    found = read_quantity(text)
    if found is None or found.end != len(text) or found.percent or found.suffix:
        return None
    return found.value


def in_digits(value: Fraction) -> str:
    r"""Write a value as an integer (`12000000`), else as a decimal if it ends within 12 places (`2.5`), else as a
    fraction (`\frac{2}{3}`)."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**12
    if scaled.denominator == 1:
        sign = "-" if value < 0 else ""
        digits = f"{abs(scaled.numerator):013d}"
        return f"{sign}{digits[:-12]}.{digits[-12:]}".rstrip("0")
    return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _from_figures(text: str, start: int, money: bool) -> Quantity | None:
    """Return the quantity that begins with figures or a fraction at `start`; None if neither is there. After a sign of
    currency (`money`) more letters are a scale: `$5m`."""
    if fraction := _LATEX_FRACTION.match(text, start) or _VULGAR.match(text, start):
        value = _fraction_of(fraction)
        end = fraction.end()
        plain = False
    elif figure := _FIGURE.match(text, start):
        value = Fraction(figure[0].replace(",", ""))
        end = figure.end()
        plain = True
        mixed = _MIXED.match(text, end) or _VULGAR.match(text, end)
        over = _OVER.match(text, end)
        part = None
        if mixed and value.denominator == 1:
            part = _fraction_of(mixed)
        if mixed and part is not None and part < 1:
            value += part
            end = mixed.end()
            plain = False
        elif over and int(over[1]):
            value /= int(over[1])
            end = over.end()
            plain = False
    else:
        return None
    if suffix := (_MONEY_SUFFIX if money else _SUFFIX).match(text, end):
        return Quantity(value * 10 ** _SUFFIXES[suffix[0].strip()[0].lower()], suffix.end(), suffix=True)
    return _Reader(text, value, end, plain).read()


def _fraction_of(match: re.Match[str]) -> Fraction:
    """Return the value of a matched fraction; 0 if its denominator is 0."""
    if match.re is _VULGAR:
        return value_of_sign(match[1])
    above, below = (int(group) for group in match.groups() if group is not None)
    if below:
        return Fraction(above, below)
    return Fraction(0)


class _Reader:
    """Reader of one number in words from a place in a text on, such as `two million five hundred thousand`.

    The value is `total + current`. A scale word multiplies `current` and moves it to `total`.

    Attributes:
        end: index behind what is read so far.
        plain: whether only figures are read so far.
        figures: whether the number began with plain figures.
        total: value of the groups whose scale words are read.
        current: value of the group that is being read; None before its first word.
        last: kind of what was read last, which decides what may follow: `figure`, `one` (zero to nineteen), `ten`,
            `hundred`, `power` (a scale word), `count` (dozen), `half` (any fraction word), `point`, `article`; empty
            at the start.
        scale: the last scale; the next one must be smaller.
        part: whether a fraction word is read.
    """

    def __init__(self, text: str, first: Fraction | None, end: int, plain: bool) -> None:
        self.text = text
        self.end = end
        self.plain = plain
        self.figures = plain
        self.total = Fraction(0)
        self.current = first
        self.last = "" if first is None else "figure"
        self.scale = 10**18
        self.part = False

    def read(self) -> Quantity | None:
        """Read as many words as belong to the number, and return it; None if there is no number."""
        for _ in range(_MOST_WORDS):
            group = None
            if self.last == "power":
                group = _NEXT_GROUP.match(self.text, self.end)
            if group:  # `500` of `2 million 500 thousand`
                self.current = Fraction(group[1].replace(",", ""))
                self.last = "figure"
                self.end = group.end()
            word = _WORD.match(self.text, self.end)
            at_start = self.current is None and not self.last
            if word is None or (at_start and word.start(1) != self.end):
                break
            if not (self._joined(word) or self._takes(word[1].lower(), word.end())):
                break
            self.plain = False
        if (self.current is None and not self.last) or self.last == "article":
            return None
        return Quantity(self.total + (self.current or 0), self.end, plain=self.plain, part=self.part)

    def _joined(self, word: re.Match[str]) -> bool:
        """Take `and a half` after a number, `and` with the next word of the same number, or `point` with its digits.
        Return whether one of them was there."""
        name = word[1].lower()
        if name == "point" and self.last in ("one", "ten"):
            return self._point(word.end())
        if name != "and" or not self.last:
            return False
        part = _AND_A_PART.match(self.text, word.end())
        if part and self.current is not None:
            if part[1]:
                count = 1
            else:
                count = {"two": 2, "2": 2}.get(part[2].lower(), 3)
            self.current += Fraction(count, _PARTS[part[3].lower().removesuffix("s")])
            self.last = "half"
            self.end = part.end()
            return True
        following = _WORD.match(self.text, word.end())
        name = ""
        if following:
            name = following[1].lower()
        if following and self.last in ("hundred", "power") and (name in _ONES or name in _TENS):
            return self._takes(name, following.end())
        return False

    def _point(self, start: int) -> bool:
        """Take the digits behind `point`, as in `two point five`. Return whether there are any."""
        digits = ""
        while (word := _WORD.match(self.text, start)) and _ONES.get(word[1].lower(), 10) < 10:
            digits += str(_ONES[word[1].lower()])
            start = word.end()
        if not digits or self.current is None:
            return False
        self.current += Fraction(int(digits), 10 ** len(digits))
        self.last = "point"
        self.end = start
        return True

    def _takes(self, name: str, end: int) -> bool:
        """Take one word, which ends at `end`, into the number. Return whether it continues the number."""
        single = name if name in _COUNTS else name.removesuffix("s")
        taken = self._small(name) or self._larger(single) or self._part_of(name, end) or self._article(name, end)
        if taken:
            self.end = max(self.end, end)
        return taken

    def _small(self, name: str) -> bool:
        """Take `zero` to `nineteen`, or a word for tens."""
        if name in _ONES:
            follows_ten = self.last == "ten" and 0 < _ONES[name] < 10
            if not (follows_ten or self.last in ("", "hundred", "power")):
                return False
            self.current = (self.current or Fraction(0)) + _ONES[name]
            self.last = "one"
            return True
        if name in _TENS and self.last in ("", "hundred", "power"):
            self.current = (self.current or Fraction(0)) + _TENS[name]
            self.last = "ten"
            return True
        return False

    def _larger(self, name: str) -> bool:
        """Take `hundred`, a counting word such as `dozen`, or a scale word."""
        if self.current is None:
            return False
        if name == "hundred" and self.last != "hundred":
            self.current *= 100
            self.last = "hundred"
        elif name in _COUNTS and self.last in ("figure", "one", "ten", "article", "half", "hundred"):
            self.current *= _COUNTS[name]
            self.last = "count"
        elif name in _POWERS and 10 ** _POWERS[name] < self.scale:
            self.scale = 10 ** _POWERS[name]
            self.total += self.current * self.scale
            self.current = None
            self.last = "power"
        else:
            return False
        return True

    def _part_of(self, name: str, end: int) -> bool:
        """Take a fraction word: `two thirds`, `a half`, `half (of) a million`. `3 quarters` is no fraction, as it may
        count coins, unless `of` follows."""
        singular = {"halves": "half"}.get(name, name.removesuffix("s"))
        if singular not in _PARTS or self.part:
            return False
        count = self.current
        if count is None and name == "half" and not self.last:
            count = Fraction(1)
        elif count is None or self.last not in ("figure", "one", "ten", "article"):
            return False
        else:
            wrong_number = (count == 1) == (name != singular)  # `one thirds`, `two third`
            of_follows = re.match(r"\s+of\b", self.text[end : end + 8])
            if wrong_number or (self.figures and singular == "quarter" and not of_follows):
                return False
        self.current = count / _PARTS[singular]
        self.last = "half"
        self.part = True
        self.end = end
        of_a = _OF_A.match(self.text, end)
        following = None
        if of_a:
            following = _WORD.match(self.text, of_a.end())
        if of_a and following and (following[1].lower() in ("hundred", *_POWERS, *_COUNTS)):
            self.end = of_a.end()
        return True

    def _article(self, name: str, end: int) -> bool:
        """Take `a` or `an` at the start if a scale, counting or fraction word follows: it counts as 1."""
        if name not in ("a", "an") or self.last:
            return False
        following = _WORD.match(self.text, end)
        next_one = ""
        if following:
            next_one = following[1].lower()
        if next_one not in ("hundred", *_POWERS, *_COUNTS, *_PARTS):
            return False
        self.current = Fraction(1)
        self.last = "article"
        return True
