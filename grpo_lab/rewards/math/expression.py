"""Find the one expression that a short text states: `18 eggs` -> `18`, `The largest $n$ is 34` -> `34`.

A number is read with all that belongs to it, since what follows may change its value, or make it one of several. What
makes it one of several is kept in the expression, so that the verifier finds it equal to no single number:

    "12 million people"  -> "12 million"      "3 apples and 5 pears"   -> "3 apples and 5" (equal to no one number)
    "8 out of 10 voters" -> "8 out of 10"     "18 because 3 + 15 = 18" -> "18"

Every scan is linear: no pattern revisits what it has passed, and each looks a bounded number of words ahead.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grpo_lab.verifiers.canonical import CURRENCY, prose_words
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
    rf"\bhow many (?:[a-z]+ ){{0,2}}?({_SCALE})s?(?![\w-])|\b(?:how much|how many|what)\b[^.?!]{{0,200}}?\bin "
    rf"({_SCALE})s(?![\w-])",
    re.IGNORECASE,
)
_MAX_SPAN = 600
_MAX_EXPRESSION = 2000
_SPAN_TOKEN = re.compile(r"\\\$|\$\$|\$|\\\(|\\\)|\\\[|\\\]")
_CLOSING = {"$$": "$$", "$": "$", r"\(": r"\)", r"\[": r"\]"}
_CURRENCY_CLASS = re.escape(CURRENCY)
_POWER_OF_TEN = (
    r"(?:[eE][-+−]?\d{1,4}(?!\w)"
    r"|\s?(?:[×·⋅*xX]|\\times|\\cdot)\s?10\s?(?:\^\s?(?:\{\s?[-+−]?\d{1,4}\s?\}|[-+−]?\d{1,4})|[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,4}))?"
)
_GROUPS = r"\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?(?![\d.,]*\d)|\d{1,3}(?:~\d{3})+(?!\d)"
_SPACED_GROUPS = r"\d{1,3}(?:(?: |\\ |\\,)\d{3})+(?:[.,]\d+)?(?![\d-])"
NUMBER = re.compile(
    rf"(?<![A-Za-z\d_.])(?:(?<![\w)\]}}])[-+−–])?[{_CURRENCY_CLASS}]?(?<!\d)"
    rf"(?:{_GROUPS}|\d[\d,]*(?:\.\d+)?|\.\d+){_POWER_OF_TEN}"
    r"(?:/\d+(?!\d|/))?(?:\s?\\?%|\s?percent\b)?"
)
_LEADING = re.compile(
    rf"(?:[-+−–]\s?)?\\?[{_CURRENCY_CLASS}]?\s?"
    rf"(?:{_GROUPS}|{_SPACED_GROUPS}|\d[\d,]*(?:\.\d+)?|\.\d+){_POWER_OF_TEN}"
    rf"(?:\s?[-+*/^×÷=:]\s?[-+−]?[{_CURRENCY_CLASS}]?\d[\d,]*(?:\.\d+)?)*(?:\s?\\?%|\s?percent\b)?"
)
_LIST_GLUE = re.compile(r"\s*(?:,|;|,?\s?and|,?\s?or)?\s*")
_PERCENT_AFTER = re.compile(r"\s*(?:\\?%|percent\b|pct\b)")
_TAIL_HEAD = re.compile(r"\b(?:is|are|equals|be|was)\b:?|(?<![!<>\\])=|(?<!\d):|:(?!\d)")  # 3:5 is a ratio
_NEXT_SUBJECT = re.compile(
    r"[\s*$]*[-+]?[^\w\s]?\d[\d,./]*[\s*$]*(?:[^\W\d_]+\s+){0,3}?[^\W\d_]*\s*(?:[,;&]|\band\b|\bor\b|\bwhile\b|\bbut\b)"
    r"(?:\s*(?:and|or|while|but)\b)?([\s$*]+(?:[^\W\d_]+[\s$*']*){1,4})"
)
_SUMMARY = re.compile(
    r"\b(?:total|sum|answer|result|so|thus|hence|therefore|which|that|this|it|final|difference|product|altogether|overall)\b",
    re.IGNORECASE,
)
_SHARE_AFTER = re.compile(  # "8 out of 10", "3:5", "17 or 18": not the one figure
    r"(?:\s+out of(?: (?:the|every|each|all))? |:|\s+or \\?\$?)\d[\d,]*(?:\.\d+)?", re.IGNORECASE
)
_BETWEEN_TWO = re.compile(r"\s+and \\?\$?\d[\d,]*(?:\.\d+)?", re.IGNORECASE)
_SIGN_IN_WORDS = re.compile(r"(?:minus|negative)\s+(?=\\?\W?\d)", re.IGNORECASE)
_COUNTED_IN_WORDS = re.compile(  # "two out of 5", "minus 5": the one figure is not the number
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten|hundred|thousand|million|billion|dozen)\b"
    r"(?:\s+[^\W\d_]+){0,2}?\s+(?:out of|of|in|and|or|to)(?:\s+(?:the|every))?\s+\W?\d|\b(?:minus|negative)\s+\W?\d",
    re.IGNORECASE,
)
_FIGURES = re.compile(r"-?\d{1,13}(?:\.\d{1,13})?", re.ASCII)  # 18, -3.5: an expression at sight
_MARKDOWN = " \t\r\n*_`>"


def asked_unit(question: str) -> Fraction | None:
    """Return the unit in which a question asks for its answer, as a number: 12 for `How many dozen eggs …?`, 1000 for
    `How much, in thousands, …?`. None if it names none."""
    found = _ASKED.search(question)
    if found is None:
        return None
    return exact_value(f"one {found[1] or found[2]}".lower())


def whole_number(text: str, start: int, end: int) -> int:
    """Return the index behind all that belongs to the number `text[start:end]`, as `million` does in `12 million`;
    `end` if nothing belongs to it."""
    read = read_quantity(text, start)
    if read is not None and not read.plain:
        end = max(end, read.end)
    listed = _LIST.match(text, end)
    if listed:
        return listed.end()
    of = None
    following = _FOLLOWING.match(text, end) or _SMALLER_MEASURE.match(text, end) or (of := _OF_OR_IN.match(text, end))
    if following is None:
        return end
    read = read_quantity(text, following.end())
    second = read.end if read else following.end()
    if of is None or of[1] or _ENDS.match(text, second):
        return second
    return end


def number_in_words(text: str) -> str | None:
    """Return the text if it is a number in words, alone or with what it counts (`five thousand`, `three eggs`); else
    None."""
    text = text.strip()
    if not text[:1].isalpha() or not any(is_value_word(word) for word in text.replace("-", " ").split()[:3]):
        return None
    read = read_quantity(text)
    if read and re.fullmatch(r"(?:\s[^\W\d_]{2,20}){0,6}\.?", text[read.end :]):
        return text
    return None


def stated_in_words(content: str) -> str | None:
    """Return the number in words that a text is, or that follows its last verb (`The total is half a million`); None
    without one."""
    content = content.strip(" \t\n*_.\"'")
    return number_in_words(content) or number_in_words(_VERB.split(content)[-1])


class Span(NamedTuple):
    """A formula in a text: `text[start:end]` with its delimiters, and its `inside` without them."""

    start: int
    end: int
    inside: str


def math_spans(text: str) -> list[Span]:
    r"""Find the formulas in `$..$`, `$$..$$`, `\(..\)` and `\[..\]`, in order. A pair of dollar signs around prose is
    none: there they mean money."""
    spans: list[Span] = []
    opened: tuple[str, int, int] | None = None
    for token in _SPAN_TOKEN.finditer(text):
        mark = token[0]
        if mark == r"\$":
            continue
        if opened is not None and mark == _CLOSING[opened[0]]:
            inside = text[opened[2] : token.start()]
            is_prose = "$" in mark and ("\n\n" in inside or len(prose_words(inside)) > 1)
            if inside.strip() and len(inside) <= _MAX_SPAN and not is_prose:
                spans.append(Span(opened[1], token.end(), inside))
                opened = None
                continue
        opened = None
        if mark in _CLOSING:
            opened = (mark, token.start(), token.end())
    return spans


def is_expression(text: str) -> bool:
    """Return whether a text is an expression and nothing else: it has no word of prose."""
    read = 0 < len(text) <= _MAX_EXPRESSION and any(map(str.isalnum, text)) and "?" not in text
    return read and not prose_words(text)


def joined(parts: list[str]) -> str:
    """Join answers into one comma-separated list, each once, in order."""
    return ", ".join(dict.fromkeys(part.strip() for part in parts))


@lru_cache(maxsize=1024)
def stated_expression(content: str) -> str | None:
    """Return the one expression that a short text states; None if it states none or several.

    It is the first of these that there is: the whole text; what the text begins with (`18 because ...`); what follows
    its last `is`, `=` or `:`; the only expression in it.
    """
    content = content.strip(_MARKDOWN).rstrip(".")
    if _FIGURES.fullmatch(content):
        return content
    stated = _whole_or_leading(content) or _after_last_verb(content)
    if stated:
        return stated
    found = expressions_in(content)
    if len(found) == 1 and not _COUNTED_IN_WORDS.search(content):
        return found[0][1]
    return None


def _whole_or_leading(content: str) -> str | None:
    """Return a text that is an expression, else the expression that it begins with: a number, or one formula or
    several in a row, which become a list."""
    content = content.strip(_MARKDOWN)
    spans = math_spans(content)
    if is_expression(content.replace("$", "")) and (content.count("$") <= 2 or len(spans) <= 1):
        return content
    if not spans or spans[0].start:
        return _leading_number(content)
    taken = [spans[0]]
    for span in spans[1:]:
        if not _LIST_GLUE.fullmatch(content, taken[-1].end, span.start):
            break
        taken.append(span)
    if len(taken) == 1:
        return _with_what_follows(content, taken[0])
    return joined([span.inside for span in taken])


def _leading_number(content: str) -> str | None:
    """Return the number that a text begins with, together with all that belongs to it (`minus 5` is -5), or None."""
    leading = _LEADING.match(content)
    if leading:
        return content[: whole_number(content, 0, leading.end())]
    sign = _SIGN_IN_WORDS.match(content)
    rest = None
    if sign:
        rest = _leading_number(content[sign.end() :])
    return f"-{rest}" if rest else None


def _with_what_follows(content: str, span: Span) -> str:
    """Return the inside of a formula and, if it is a number, what belongs to it: `12 million` for `$12$ million`,
    `8 out of 10` for `$8$ out of $10$`."""
    inside = span.inside.strip()
    if _PERCENT_AFTER.match(content, span.end):
        return inside + r"\%"
    if re.fullmatch(r"[-+]?[\d.,]*\d", inside) is None:
        return inside
    following = inside + content[span.end :]
    return following[: whole_number(following, 0, len(inside))].replace("$", "")


def _after_last_verb(content: str) -> str | None:
    """Return the expression behind the last `is`, `=`, `:` or the like outside of formulas; None if there is none, or
    the text states several values (`x is 3 and y is 5`)."""
    spans = math_spans(content)
    heads = [head for head in _TAIL_HEAD.finditer(content) if not any(s.start < head.start() < s.end for s in spans)]
    if not heads:
        return None
    between = None
    if len(heads) > 1:
        between = _NEXT_SUBJECT.fullmatch(content, heads[-2].end(), heads[-1].start())
    if between and not _SUMMARY.search(between[1]):
        return None  # `x is 3 and y is 5`, `Anna: 3, Tomas: 5`: the last is one of two, not the result of the text
    return _whole_or_leading(content[heads[-1].end() :])


def expressions_in(text: str) -> list[tuple[int, str]]:
    """Return (index of its end, expression) of every formula and of every number outside of formulas, in order."""
    spans = math_spans(text)
    found = [
        (span.end, span.inside.strip() + (r"\%" if _PERCENT_AFTER.match(text, span.end) else "")) for span in spans
    ]
    starts = [span.start for span in spans]
    ends = [span.end for span in spans]
    for start, stop in zip([0, *ends], [*starts, len(text)], strict=True):
        found += _numbers(text, start, stop)
    return sorted(found)


def _numbers(text: str, start: int, stop: int) -> list[tuple[int, str]]:
    """Return (index of its end, text) of every number in `text[start:stop]`. `12 million` and `8 out of 10` are one
    number each."""
    found: list[tuple[int, str]] = []
    done = start
    for match in NUMBER.finditer(text, start, stop):
        if match.start() < done:
            continue
        read = read_quantity(text, match.start())
        if read is None or read.plain:
            end = match.end()
        else:
            end = max(match.end(), read.end)
        between = text[max(0, match.start() - 9) : match.start()].rstrip("$\\ ").lower().endswith("between")
        share = (_BETWEEN_TWO if between else _SHARE_AFTER).match(text, end)
        if share:
            end = share.end()
        done = end if end <= stop else match.end()
        found.append((done, text[match.start() : done]))
    return found
