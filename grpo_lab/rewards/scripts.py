"""Writing systems: which script a character is in, which languages we tell apart within one, how words are counted.

A *script group* is a set of scripts that one text in one language mixes as a matter of course (Han and kana). Languages
in different groups are told apart by their characters alone; within a group by ``language_evidence``.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

__all__ = [
    "CASED",
    "GROUP_OF_LANGUAGE",
    "LANGUAGES_OF_GROUP",
    "OTHER",
    "UNSPACED",
    "has_kana",
    "known_languages",
    "script_group",
]

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

zh, ja: characters per English word of the same sentences, measured on the parallel rows (PUD, MGSM) of our language data:
913/597 and 723/307. th: average length of a Thai word (no parallel data here).
"""

_UNICODE_NAMES = {
    "LATIN": "latin",
    "CYRILLIC": "cyrillic",
    "ARABIC": "arabic",
    "CJK": "cjk",
    "HIRAGANA": "cjk",
    "KATAKANA": "cjk",
    "KATAKANA-HIRAGANA": "cjk",
    "IDEOGRAPHIC": "cjk",
    "HANGUL": "hangul",
    "DEVANAGARI": "devanagari",
    "BENGALI": "bengali",
    "TAMIL": "tamil",
    "GREEK": "greek",
    "HEBREW": "hebrew",
    "THAI": "thai",
}


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
