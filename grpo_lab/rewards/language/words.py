r"""Text → the words that say something about its language, each with its script.

"Digits, LaTeX, code and names are neither for nor against". Left out here: fenced and inline code, ``[asy]`` drawings,
formulas (``$…$``, ``\(…\)``, ``\[…\]``), LaTeX commands, GSM8K's ``<<…>>`` sums, web and mail addresses, tokens with
digits or underscores, camelCase, single consonants, short labels in capitals, unit and function symbols. Names are
handled where evidence is weighed (``evidence``, ``reward``), since no rule on one word can recognise them.

The neutral places hide no prose: characters of other scripts than Latin and Greek count wherever they stand, and so do
the contents of ``\text{…}``. Every pattern is linear in the length of the text: model text is hostile.

A *script group* is a set of scripts that one text in one language mixes as a matter of course (Han and kana). Languages
in different groups differ in their characters alone; within a group ``evidence`` decides.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any, NamedTuple

import regex

OTHER = "other"
"""The group of characters whose script no known language uses, and the "language" of words that fit none."""

LANGUAGES_OF_GROUP: dict[str, tuple[str, ...]] = {
    "latin": ("en", "es", "fr", "de", "pt", "it", "nl", "vi", "id", "pl", "cs", "ro", "sv", "da", "fi", "hu", "tr"),
    "cyrillic": ("ru", "uk", "bg", "mk"),
    "arabic": ("ar", "fa", "ur"),
    "cjk": ("zh", "ja"),
    "hangul": ("ko",),
    "devanagari": ("hi",),
    "bengali": ("bn",),
    "tamil": ("ta",),
    "greek": ("el",),
    "hebrew": ("he",),
    "thai": ("th",),
}

GROUP_OF_LANGUAGE: dict[str, str] = {
    language: group for group, languages in LANGUAGES_OF_GROUP.items() for language in languages
}

CASED = frozenset({"latin", "cyrillic", "greek"})

UNSPACED: dict[str, float] = {"zh": 1.55, "ja": 2.35, "th": 4.5}
"""Characters that weigh as much as one word of a spaced script, for scripts that do not mark words.

zh, ja: characters per English word of the same sentences, measured on the parallel rows (PUD, MGSM) of our language
data: 913/597 and 723/307. th: average length of a Thai word (no parallel data here).
"""

_CJK = "CJK HIRAGANA KATAKANA KATAKANA-HIRAGANA IDEOGRAPHIC"
_UNICODE_NAMES = {group.upper(): group for group in LANGUAGES_OF_GROUP} | dict.fromkeys(_CJK.split(), "cjk")


@lru_cache(maxsize=65_536)
def script_group(letter: str) -> str:
    """The script group of one letter or mark (``OTHER`` where we know no language for it)."""
    return _UNICODE_NAMES.get(unicodedata.name(letter, "").split(" ", 1)[0], OTHER)


def has_kana(text: str) -> bool:
    """Whether a Japanese syllable sign is among the characters (Chinese has none)."""
    return any("\u3041" <= character <= "\u30ff" for character in text)


def known_languages() -> list[str]:
    """Codes that can be a target."""
    return sorted(GROUP_OF_LANGUAGE)


class Word(NamedTuple):
    """One word of a spaced script, or one unbroken run of characters of an unspaced one."""

    text: str  # case-folded, NFKC
    group: str  # script group
    capitalised: bool


_SYMBOLS = (
    "sin cos tan cot sec csc arcsin arccos arctan log ln exp lim sup inf "
    "max min gcd lcm mod det sqrt frac cdot boxed "
    "km cm mm kg mg ml kph mph lbs ft oz hr hrs sq cu"
)
_NEUTRAL_WORDS = frozenset(_SYMBOLS.split())

LETTER_WORDS = frozenset("aeiouy")
"""Single letters a–z that are a word somewhere (English "a", Spanish "y", Portuguese "o"). They can as well be
variables."""

_ENVIRONMENTS = (
    "align aligned alignat alignedat equation gather gathered array eqnarray "
    "multline split cases matrix pmatrix bmatrix vmatrix"
)
_PAIRS = (
    ("[asy]", "[/asy]"),
    *((f"\\begin{{{name}{star}}}", f"\\end{{{name}{star}}}") for name in _ENVIRONMENTS.split() for star in ("", "*")),
    *(("\\[", "\\]"), ("\\(", "\\)"), ("<<", ">>")),
)
_FENCE = re.compile(r"```|~~~")
_INLINE_CODE = re.compile(r"`[^`\n]{1,200}`")
_DISPLAY = re.compile(r"\$\$[^$]{1,2000}\$\$")
# As in pandoc: no space just inside the dollars and no digit after them, so that "$5 and $7" is money.
_FORMULA = re.compile(r"\$(?=[^\s$])[^$]{0,600}?(?<=[^\s$])\$(?![0-9])")
_PROSE_IN_FORMULA = re.compile(r"\\(?:text|textbf|textit|textrm|mbox)\s*\{([^{}]{0,500})\}")
_LATEX_NAME = re.compile(r"\\(?:begin|end|operatorname|mathrm|mathbf|mathbb|mathcal|label|ref)\s*\*?\{[^{}]{0,60}\}")
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+\*?")
_ADDRESS = re.compile(r"https?://[!-~]+|(?<![A-Za-z0-9.+-])[A-Za-z0-9.+-]{1,64}@[A-Za-z0-9.-]+")
_INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\u2060\ufeff\u0640"))  # soft hyphen, zero widths, Arabic tatweel
_LATIN_OR_GREEK = re.compile(r"[A-Za-z\u00c0-\u024f\u0370-\u03ff\u1e00-\u1fff]+")
# Letters with their combining marks, digits, underscores, inner apostrophes and joiners: one token. (`regex`, which
# transformers needs too, has Unicode's classes; stdlib `re` would cut हिन्दी at its vowel signs.)
_TOKEN = regex.compile(r"[\p{L}\p{M}\p{N}_\u200c\u200d]+(?:['’][\p{L}\p{M}\p{N}_\u200c\u200d]+)*")
_CAMEL = re.compile(r"[a-z][A-Z]")


def words_of(text: str) -> list[Word]:
    """The countable words of ``text`` in order. Empty where there are only digits, formulas and signs."""
    text = unicodedata.normalize("NFKC", text).translate(_INVISIBLE)
    return [word for match in _TOKEN.finditer(_prose(text)) for word in _token_words(match)]


def _prose(text: str) -> str:
    """``text`` with code and formulas blanked, except what they contain in other scripts and in ``\\text{…}``."""
    pieces = _FENCE.split(text)
    text = "".join(piece if at % 2 == 0 else _blank(piece) for at, piece in enumerate(pieces))
    for opener, closer in _PAIRS:
        text = _blank_between(text, opener, closer)
    for pattern in (_INLINE_CODE, _DISPLAY, _FORMULA, _ADDRESS):
        text = pattern.sub(lambda match: _blank(match.group()), text)
    text = _PROSE_IN_FORMULA.sub(r" \1 ", text)
    text = _LATEX_NAME.sub(" ", text)
    return _LATEX_COMMAND.sub(" ", text)


def _blank(span: str) -> str:
    prose = " ".join(_PROSE_IN_FORMULA.findall(span))
    rest = _LATIN_OR_GREEK.sub(" ", _PROSE_IN_FORMULA.sub(" ", span)) if not span.isascii() else ""
    return f" {prose} {rest} "


def _blank_between(text: str, opener: str, closer: str) -> str:
    """Blank every ``opener … closer``; an opener that is never closed is left as it is."""
    pieces, at = [], 0
    while (start := text.find(opener, at)) >= 0 and (end := text.find(closer, start + len(opener))) >= 0:
        pieces += [text[at:start], _blank(text[start + len(opener) : end])]
        at = end + len(closer)
    return "".join([*pieces, text[at:]])


def _token_words(match: Any) -> tuple[Word, ...]:
    token = match.group()
    if token.isascii():
        return _latin_word(token, match.string, match.end())
    return _mixed_words(token) if len(token) <= 40 else _mixed_words.__wrapped__(token)


@lru_cache(maxsize=65_536)
def _mixed_words(token: str) -> tuple[Word, ...]:
    pieces = _script_runs(token)
    has_digit = any(group is None for group, _ in pieces)
    return tuple(
        word
        for group, piece in pieces
        if group is not None and not (has_digit and group == "latin")
        for word in _piece_words(piece, group)
    )


def _latin_word(token: str, text: str, end: int) -> tuple[Word, ...]:
    """An ASCII token, unless it is code, a variable or a symbol."""
    if not token.replace("'", "").isalpha():
        return ()
    is_label = 2 <= len(token) <= 3 and token.isupper()  # a triangle ABC, the EU
    if is_label or _CAMEL.search(token) or text[end : end + 1] == "(":
        return ()
    return tuple(_piece_words(token, "latin"))


def _piece_words(piece: str, group: str) -> list[Word]:
    folded = piece.casefold().replace("’", "'").strip("'")
    if folded in _NEUTRAL_WORDS or _is_symbol(folded, group):
        return []
    return [Word(folded, group, piece[0].isupper())] if folded else []


def _is_symbol(letter: str, group: str) -> bool:
    """A single consonant a–z or a single Greek letter."""
    return len(letter) == 1 and letter not in LETTER_WORDS and (letter.isascii() or group == "greek")


def _script_runs(token: str) -> list[tuple[str | None, str]]:
    """``token`` cut where the script changes; ``None`` for digits, underscores and the like.

    Marks, apostrophes and joiners belong to the letters before them.
    """
    runs: list[tuple[str | None, str]] = []
    for letter in token:
        if unicodedata.category(letter)[0] == "M" or letter in "'’\u200c\u200d":
            if runs:
                runs[-1] = (runs[-1][0], runs[-1][1] + letter)
            continue
        group = script_group(letter) if letter.isalpha() or letter in "々〆ー" else None
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1] + letter)
        else:
            runs.append((group, letter))
    return runs
