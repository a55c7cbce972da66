"""Question text as a sequence of words, the common ground of the duplicate and contamination filters.

Normalised: Unicode NFKC, case folded, mark-up and punctuation gone, `1,000` and `1000` the same, every Chinese or
Japanese character a word of its own. Masked: every number, in digits or in English words, replaced by `#`, so that the
same problem with other numbers is the same sequence.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MASK: Final = "#"

_WORD = re.compile(
    r"\d+(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?"  # 1,000.5  12.5
    r"|[\u3400-\u9fff\u3040-\u30ff]"  # one CJK character
    r"|\\[a-z]+|[^\W\d_]+(?:['’][^\W\d_]+)*"  # \frac   ducks'   don't
    r"|[+*/=<>^%$€£-]",
)
_LAYOUT = r"\left \right \text \mathrm \mathbf \textbf \quad \qquad \big \bigl \bigr \displaystyle"
_MARKUP: Final = frozenset(["$", *_LAYOUT.split()])
_SAME_WORD: Final = {r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cdot": "*", r"\times": "*"}
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion dozen "
    "half third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths "
    "once twice thrice double triple quadruple first second"
)
_NUMBER_WORDS: Final = frozenset(_NUMBERS.split())


def words_of(text: str) -> list[str]:
    """The normalised words of a text, in order. Linear in its length; any text is accepted."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words: list[str] = []
    for word in _WORD.findall(folded):
        if word in _MARKUP:
            continue
        if "," in word:
            word = word.replace(",", "")
        words.append(_SAME_WORD.get(word, word).replace("’", "'"))
    return words


def masked(words: list[str]) -> list[str]:
    """The words with every number replaced by `MASK`; neighbouring numbers (`3 1/2`, `twenty five`) become one mask."""
    result: list[str] = []
    for word in words:
        if word[0].isdigit() or word in _NUMBER_WORDS:
            if not (result and result[-1] == MASK):
                result.append(MASK)
        else:
            result.append(word)
    return result
