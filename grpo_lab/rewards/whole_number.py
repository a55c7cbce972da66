r"""A number in running text with all that belongs to it: what follows may change its value, or make it one of several.

    "12 million people"          -> "12 million"
    "3 and a half hours"         -> "3 and a half"
    "8 out of 10 voters"         -> "8 out of 10"
    "3 apples and 5 pears"       -> "3 apples and 5"      (several answers: equal to no single number)
    "18 because 3 + 15 = 18"     -> "18"

Every pattern here looks a bounded number of words ahead.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grpo_lab.verifiers.quantity import exact_value, is_value_word, read_quantity

_NOT_A_UNIT = (
    r"(?:because|since|as|so|which|that|if|when|while|after|before|for|from|with|by|than|is|are|was|equals?|and|or|to|of|in"
    r"|out|per|over|remainder|times|plus|minus)\b"
)
_UNITS_AHEAD = rf"(?:\s+(?!{_NOT_A_UNIT})[^\W\d_]{{1,20}}\.?){{0,3}}?"
_DOLLARS = r"\s?(?:\\?[$€£¥]|\\\()?\s?"
_NEXT_FIGURE = rf"{_DOLLARS}(?=[-−]?\.?\d)"
_ROUNDING = r"(?!\s?\d+\s+(?:decimal|significant|s\.?f|d\.?p|dp\b|places?\b|digits?\b))"
_FOLLOWING = re.compile(
    rf"{_UNITS_AHEAD}(?:\$|\\\))?(?:\s*,)?\s*(?:\b(?:and|or|remainder|rem\.?|versus|vs\.?|through)\b|&)\s*{_NEXT_FIGURE}"
    rf"|{_UNITS_AHEAD}(?:\$|\\\))?\s+(?:to|out of(?: (?:the|every|each|all|a total of))?)\b{_ROUNDING}\s*{_NEXT_FIGURE}"
    rf"|(?:\$|\\\))?\s+(?:over|times|plus|minus|divided by|multiplied by)\b\s*{_NEXT_FIGURE}"
    rf"|\s?[rR]\s?(?=\d)",
    re.IGNORECASE,
)
_OF_OR_IN = re.compile(rf"(?:\$|\\\))?\s+(?:(of)|in|per|by)\b\s*{_NEXT_FIGURE}", re.IGNORECASE)
_ENDS = re.compile(r"[$*\s.!)]*(?:chance|chances|odds|people)?[*\s.!]*$", re.IGNORECASE)
_MEASURE = (
    r"(?:h|hr|hrs|hours?|min|mins|minutes?|days?|weeks?|months?|years?|ft|feet|foot|yards?|m|met(?:er|re)s?|km|kilomet(?:er|re)s?"
    r"|lb|lbs|pounds?|kg|kilograms?|stone|gallons?|dollars?|euros?|degrees?)"
)
_SMALLER_MEASURE = re.compile(rf"\s?{_MEASURE}\b,?\s+(?=\d)", re.IGNORECASE)
_VERB = re.compile(r"\b(?:is|are|equals|was)\b:?|=|:")
_LIST = re.compile(
    r"(?:\s+[^\W\d_]{1,20}){1,2}(?:\s*,\s*(?:and\s+)?\d[\d,.]*(?:\s+[^\W\d_]{1,20}){1,2}){1,8}\s*\.?\s*$"
)

_SCALE = "dozen|hundred|thousand|million|billion|trillion|lakh|crore|gross|score|half|halve"
_ASKED = re.compile(
    rf"\bhow many (?:[a-z]+ ){{0,2}}?({_SCALE})s?(?![\w-])|\b(?:how much|how many|what)\b[^.?!]{{0,200}}?\bin ({_SCALE})s(?![\w-])",
    re.IGNORECASE,
)


def asked_unit(question: str) -> Fraction | None:
    """What a question wants counted in: 12 for `How many dozen eggs …?`, 1000 for `How much, in thousands of dollars, …?`; else None."""
    found = _ASKED.search(question)
    return None if found is None else exact_value(f"one {found[1] or found[2]}".lower())


def whole_number(text: str, start: int, end: int) -> int:
    """Where the number `text[start:end]` ends with all that belongs to it; `end` where nothing does."""
    read = read_quantity(text, start)
    if read is not None and not read.plain:
        end = max(end, read.end)
    listed = _LIST.match(text, end)
    if listed:
        return listed.end()
    following = _FOLLOWING.match(text, end) or _SMALLER_MEASURE.match(text, end)
    if following is None:
        following = _OF_OR_IN.match(text, end)
        if following is None:
            return end
        second = _figure_end(text, following.end())
        return second if following[1] or _ENDS.match(text, second) else end
    return _figure_end(text, following.end())


def _figure_end(text: str, start: int) -> int:
    read = read_quantity(text, start)
    return read.end if read else start


def number_in_words(text: str) -> str | None:
    """The text, where it is a number written in words, alone or with what it counts: `five thousand`, `three eggs`."""
    text = text.strip()
    if not text[:1].isalpha() or not any(is_value_word(word) for word in text.replace("-", " ").split()[:3]):
        return None
    read = read_quantity(text)
    if read is None:
        return None
    rest = text[read.end :]
    counted = re.fullmatch(r"(?:\s[^\W\d_]{2,20}){0,6}\.?", rest)
    return text if counted is not None else None


def stated_in_words(content: str) -> str | None:
    """A number in words, alone or after the last verb: `five thousand`, `The total is half a million`."""
    content = content.strip(" \t\n*_.\"'")
    return number_in_words(content) or number_in_words(_VERB.split(content)[-1])
