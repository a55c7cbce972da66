"""Text → how many words it has and which share of them is in which language.

First the script of each word (``scripts``), then, within a script that several languages share, the mixture of languages
that explains its words best (``language_mixture``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_lab.rewards.language_evidence import word_likelihoods
from grpo_lab.rewards.language_mixture import mixture_shares
from grpo_lab.rewards.language_words import LETTER_WORDS, Word, words_of
from grpo_lab.rewards.scripts import CASED, LANGUAGES_OF_GROUP, OTHER, UNSPACED, has_kana

__all__ = ["LanguageShares", "language_shares"]

CAPITALS_PER_WORD = 0.6
"""Capitalised words for each other word that prose explains (German, the highest: about 0.5)."""
LETTERS_PER_WORD = 0.15
"""One-letter words for each other word of Latin prose (Portuguese, the highest: about 0.12)."""
MOST_NAMES = 0.15
"""At most this share of a text's words is forgiven as names in a foreign script."""


@dataclass(frozen=True)
class LanguageShares:
    """``words``: countable words (an estimate where a script does not mark them). ``shares`` of them, summing to 1."""

    words: float
    shares: Mapping[str, float]

    def dominant(self) -> str | None:
        """The language of more than half of the words; ``None`` if there is none or no language we know."""
        best = max(self.shares, key=lambda language: self.shares[language], default=OTHER)
        return best if best != OTHER and self.shares[best] > 0.5 else None


def language_shares(text: str, expected: str | None = None) -> LanguageShares:
    """Share of each language in the words of ``text``; no words, no shares.

    ``expected`` is the language to which words go that fit several equally (``language_mixture.DOUBT``).
    """
    groups: dict[str, list[Word]] = {}
    letters = 0
    for word in words_of(text):
        if word.text in LETTER_WORDS:
            letters += 1
        else:
            groups.setdefault(word.group, []).append(word)
    sizes = _without_foreign_names({group: _size(words) for group, words in groups.items()}, groups)
    if "latin" in sizes:  # a letter is a word as far as the prose around it explains, else a variable
        sizes["latin"] += min(letters, LETTERS_PER_WORD * sizes["latin"])
    total = sum(sizes.values())
    if total == 0:
        return LanguageShares(0.0, {})
    shares: Counter[str] = Counter()
    for group, words in groups.items():
        for language, share in _within_group(words, group, expected).items():
            shares[language] += share * sizes[group] / total  # type: ignore[assignment]
    return LanguageShares(total, dict(shares))


def _within_group(words: Sequence[Word], group: str, expected: str | None) -> dict[str, float]:
    languages = LANGUAGES_OF_GROUP.get(group, (OTHER,))
    if len(languages) == 1:
        return {languages[0]: 1.0}
    counted = Counter(words)
    distinct = list(counted)
    counts = np.array([counted[word] * _words_in(word) for word in distinct], dtype=np.float64)
    shares = mixture_shares(
        word_likelihoods(distinct, group), counts, languages.index(expected) if expected in languages else None
    )
    return {language: float(share) for language, share in zip((*languages, OTHER), shares) if share > 0}


def _size(words: Sequence[Word]) -> float:
    return float(sum(_words_in(word) for word in words))


def _words_in(word: Word) -> int:
    """1, except for a run of an unspaced script: its characters over the characters per word, at least 1."""
    if word.group == "cjk":
        return max(1, round(len(word.text) / UNSPACED["ja" if has_kana(word.text) else "zh"]))
    if word.group == "thai":
        return max(1, round(len(word.text) / UNSPACED["th"]))
    return 1


def _without_foreign_names(sizes: Mapping[str, float], groups: Mapping[str, Sequence[Word]]) -> dict[str, float]:
    """Take names in a foreign script out: "小明 and John" in Chinese prose says nothing about its language.

    In a script that is not the text's main one, capitalised words are names unless there is lower-case prose around that
    explains them; never more than ``MOST_NAMES`` of all words, or prose In Capitals Like This would cost nothing.
    """
    main = max(sizes, key=lambda group: sizes[group], default=OTHER)
    remaining = dict(sizes)
    forgivable = MOST_NAMES * sum(sizes.values())
    for group in sorted(CASED & sizes.keys() - {main}):
        capitals = sum(word.capitalised for word in groups[group])
        names = max(0.0, capitals - CAPITALS_PER_WORD * (len(groups[group]) - capitals))
        forgiven = min(names, forgivable)
        forgivable -= forgiven
        remaining[group] -= forgiven
    return remaining
