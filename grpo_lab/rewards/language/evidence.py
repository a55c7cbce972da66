"""How likely a word is in each language that shares its script: p(word | language), unnormalised.

Two offline sources: **wordfreq** (~20–30 thousand words a language), p(w | l) is the word's frequency; **lingua**
(character n-grams) for words that no list knows: its confidences share out the frequency of a word just too rare for
the lists.

Capitalised words are mostly names, which say little: they get a constant on top in every language, so that a frequent
function word keeps its evidence ("The") and a name follows its text. The constant is larger for a name that most lists
have (José) than for a German noun.

Not from a paper: R1 (arXiv 2501.12948, section 2.3.2) defines the reward and not how words are assigned to languages.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_lab.rewards.language.words import LANGUAGES_OF_GROUP, Word, has_kana

Likelihoods = NDArray[np.float64]

UNSEEN = 1e-7
"""Frequency given to a word in a language whose list lacks it (the lists end at 1e-6: a word in a million)."""
LISTED = 5e-7  # between the lists' least frequency and what a word gets without being in any
FOREIGN = 3e-7
"""p(w | no language we know): a word that no language explains better than this counts as ``other``."""
NAME, KNOWN_NAME = 1e-5, 1e-3
"""Added to every language (and ``other``) for a capitalised word; the second where half of the lists or more have
it."""
LONGEST_WORD = 40
RARE_CHARACTER = log(1e-6)
TRADITIONAL = 0.3  # a character in its traditional form, beside its simplified one
HAN_IN_JAPANESE = log(0.45)  # about that share of Japanese characters is Han; counted for three characters of a run
KANA_IN_CHINESE = log(1e-3)
MAX_GUESSED = 250
"""At most this many different unlisted words of one text are shown to lingua (0.3 ms each); the rest say nothing."""


def word_likelihoods(words: Sequence[Word], group: str) -> Likelihoods:
    """``[W, L + 1]``: p(w | l) for the languages of ``group`` in the order of ``LANGUAGES_OF_GROUP``, then
    ``other``."""
    languages = LANGUAGES_OF_GROUP[group]
    if group == "cjk":
        return _run_likelihoods(words, languages)
    table = np.full((len(words), len(languages) + 1), FOREIGN)
    guesses = 0
    for row, word in enumerate(words):
        known = _listed(word.text, languages)
        if known is None and guesses < MAX_GUESSED and len(word.text) <= LONGEST_WORD:
            guesses += 1
            known = _guessed(word.text, languages)
        table[row, :-1] = UNSEEN if known is None else known
        if word.capitalised:
            listed_in = int((table[row, :-1] > LISTED).sum())
            table[row] += KNOWN_NAME if 2 * listed_in >= len(languages) else NAME
    return table


def _run_likelihoods(runs: Sequence[Word], languages: tuple[str, ...]) -> Likelihoods:
    """``[W, L + 1]`` for unbroken runs of Han and kana: a run is in one language, p(run | l) = Π p(character | l).

    Relative to the run's likeliest language, since only ratios matter and the product of a long run underflows.
    """
    tables = [_characters(language) for language in languages]
    logs = np.array([[sum(table.get(c, RARE_CHARACTER) for c in run.text) for table in tables] for run in runs])
    for row, run in enumerate(runs):
        if not has_kana(run.text):
            logs[row, languages.index("ja")] += HAN_IN_JAPANESE * min(len(run.text), 3)
    logs -= logs.max(axis=1, keepdims=True)
    return np.concatenate([np.exp(np.maximum(logs, -50.0)), np.full((len(runs), 1), 1e-6)], axis=1)


@cache
def _characters(language: str) -> dict[str, float]:
    """log p(character | language, kind), kind = Han or kana, from the word list.

    Given the kind, so that Japanese with few kana is not taken for Chinese; a kana is 1 in Japanese and rare in
    Chinese.
    """
    frequency: dict[str, float] = {}
    for word, weight in _frequencies(language).items():
        for character in word:
            if "\u3400" <= character <= "\u9fff":
                frequency[character] = frequency.get(character, 0.0) + weight
    if language == "zh":  # the list is in simplified characters
        for traditional, simplified in _simplified().items():
            frequency.setdefault(traditional, TRADITIONAL * frequency.get(simplified, 0.0))
    total = sum(frequency.values())
    logs = {character: max(log(max(weight, 1e-12) / total), RARE_CHARACTER) for character, weight in frequency.items()}
    kana = 0.0 if language == "ja" else KANA_IN_CHINESE
    return logs | {chr(code): kana for code in range(0x3041, 0x3100)}


def _simplified() -> dict[str, str]:
    """Traditional → simplified characters, from wordfreq's data folder (its function for it would need jieba)."""
    path = Path(_offline_library("wordfreq").__file__).parent / "data" / "_chinese_mapping.msgpack.gz"
    packed = _offline_library("msgpack").loads(gzip.decompress(path.read_bytes()), strict_map_key=False)
    return {chr(code): simplified for code, simplified in packed.items() if isinstance(simplified, str)}


@lru_cache(maxsize=100_000)
def _listed(word: str, languages: tuple[str, ...]) -> Likelihoods | None:
    """Frequencies, with ``UNSEEN`` for the lists that lack the word; ``None`` where all do."""
    lists = [_frequencies(language) for language in languages]
    forms = [word]
    if "'" in word:  # French and Italian lists hold the parts of l'homme, the English one don't as a whole
        forms += [part for part in word.split("'") if len(part) > 1][-1:]
    for form in forms:
        found = [words.get(form, 0.0) for words in lists]
        if any(found):
            seen: Likelihoods = np.maximum(np.array(found), UNSEEN)
            return seen
    return None


@lru_cache(maxsize=100_000)
def _guessed(word: str, languages: tuple[str, ...]) -> Likelihoods:
    """Lingua's confidences as frequencies of an unlisted word: mean ``UNSEEN`` over the languages."""
    confidences = {
        value.language.iso_code_639_1.name.lower(): value.value
        for value in _detector(languages).compute_language_confidence_values(word)
    }
    shares = np.array([confidences[language] for language in languages])
    guess: Likelihoods = UNSEEN * len(languages) * (shares + 0.02) / (shares + 0.02).sum()
    return guess


@cache
def _frequencies(language: str) -> dict[str, float]:
    words: dict[str, float] = _offline_library("wordfreq").get_frequency_dict(language, "small")
    return words


@cache
def _detector(languages: tuple[str, ...]) -> Any:
    lingua = _offline_library("lingua")
    codes = [getattr(lingua.IsoCode639_1, language.upper()) for language in languages]
    # Trigram models only: 30 MB instead of 500 for the Latin languages, and unlisted words are rarely short.
    return lingua.LanguageDetectorBuilder.from_iso_codes_639_1(*codes).with_low_accuracy_mode().build()


def _offline_library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            "LanguageConsistencyReward distinguishes languages of one script with wordfreq and "
            "lingua-language-detector, and "
            f"{name!r} cannot be imported here ({error}). Install them: pip install 'grpo_lab[language]'"
        ) from error
