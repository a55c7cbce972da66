r"""Read multiple-choice answers: the letter that an answer names, and the text behind it.

(A) 5 apples     \textbf{(A)}\ 5     A. 5     (\text{A}) 5        -> A, and `5 apples` or `5`
(A) or (B)       (A) 5 (B) 6         (A) is wrong                 -> no letter: several, or none
"""

from __future__ import annotations

import re
from typing import NamedTuple

_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox|bf|rm)\s*\{([^{}]{0,80})\}")
_GAP = re.compile(r"\\[ ,;:!]|~|\*\*|__")
_LABEL = re.compile(r"(?:\(\s?([A-H])\s?\)|([A-H])\s?[).:](?=\s|$|[^\s\w]))[.:]?\s*")
_MAY_BEGIN = re.compile(r"[\s*_$~]*\(?\s?(?:\\|[A-H]\s?[).:])")
_HEAD = 120
_OPERATOR = re.compile(r"[-+*/=^_,;)<>|!']|\\(?:cup|cap|times|cdot|in|to|pm|le|ge|leq|geq|neq|subset)(?![a-z])")
_LONE = re.compile(r"\(?([A-H])\)?\.?")
_OTHER_LABEL = re.compile(r"\(\s?([A-Z])\s?\)|(?<![\w(])([A-Z])[).:](?=\s|$)")
_HEDGED = re.compile(
    r"^(?:or|and|nor|not|but|neither|either|is not|isn't|is (?:wrong|incorrect|false)|wrong|incorrect|false)\b"
    r"|\b(?:or|and|nor|not|also|maybe|perhaps|possibly)\s+\(?[A-H]\)?(?!\w)",
    re.IGNORECASE,
)


class Choice(NamedTuple):
    """A choice that an answer names.

    Attributes:
        label: its letter, A to H.
        behind: the text behind the letter; empty without one.
        wrapped: whether the letter was set as LaTeX text, as in `\\textbf{(A)}`.
    """

    label: str
    behind: str
    wrapped: bool


def read_choice(text: str) -> Choice | None:
    """Return the choice with which a text begins; None if it does not begin with a choice, or also names another
    one."""
    if not _MAY_BEGIN.match(text):
        return None  # the code below gives the same, in ten times the time
    head = text[:_HEAD]
    flat = " ".join(_GAP.sub(" ", _WRAPPED.sub(r"\1", head) + text[_HEAD:]).split())
    label = _LABEL.match(flat)
    if label is None:
        return None
    behind = flat[label.end() :].strip()
    name = label[1] or label[2]
    if _OPERATOR.match(behind) or _HEDGED.search(behind):
        return None
    lone = _LONE.fullmatch(behind)
    if lone and lone[1] != name:
        return None
    if any((other[1] or other[2]) != name for other in _OTHER_LABEL.finditer(behind)):
        return None
    return Choice(name, behind, wrapped=head.lstrip("( ").startswith("\\"))
