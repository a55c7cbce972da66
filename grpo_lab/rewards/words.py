r"""Split a text into the words that show its language, and compute how likely each is in the languages of its script.

**Words.** Digits, LaTeX, code and names count neither for nor against a language.
docs/algorithms/language_consistency.md says what is left out, and why no prose can hide there. Every pattern is linear
in the length of the text: model text is hostile.

A *script group* is a set of scripts that texts of one language commonly mix (Han and kana). Languages in different
groups are told apart by their characters alone.

**Likelihoods** within a group, p(word | language), are wordfreq's frequencies, not normalised (its lists have 20 to 30
thousand words a language). A word that is in no list gets a frequency just too low for them, divided among the
languages by the confidences of the language detector lingua.
"""

from __future__ import annotations

import gzip
import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regex
from numpy.typing import NDArray

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
"""Characters that weigh as much as one word, for scripts that do not mark words. zh, ja: characters per English word on
the parallel rows (PUD, MGSM) of our language data: 913/597 and 723/307. th: average length of a Thai word."""

_CJK = "CJK HIRAGANA KATAKANA KATAKANA-HIRAGANA IDEOGRAPHIC"
_UNICODE_NAMES = {group.upper(): group for group in LANGUAGES_OF_GROUP} | dict.fromkeys(_CJK.split(), "cjk")


def has_kana(text: str) -> bool:
    """Return whether the text has a Japanese syllable sign (Chinese has none)."""
    return any("\u3041" <= character <= "\u30ff" for character in text)


def known_languages() -> list[str]:
    """Return the codes of the languages that can be told apart, sorted."""
    return sorted(GROUP_OF_LANGUAGE)


class Word(NamedTuple):
    """A word or, in a script without spaces between words, an unbroken run of characters."""

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
"""Letters that alone are a word in some language (English "a", Spanish "y"), though each may also be a variable."""

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
    """Return the countable words of ``text`` in order; none if there are only digits, formulas and signs."""
    text = _prose(unicodedata.normalize("NFKC", text).translate(_INVISIBLE))
    words: list[Word] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token.isascii():
            is_label = 2 <= len(token) <= 3 and token.isupper()  # a triangle ABC, the EU
            called = text[match.end() : match.end() + 1] == "("
            if token.replace("'", "").isalpha() and not (is_label or called or _CAMEL.search(token)):
                words += _piece_words(token, "latin")
        else:
            words += _mixed_words(token) if len(token) <= 40 else _mixed_words.__wrapped__(token)
    return words


def _prose(text: str) -> str:
    """Remove code, formulas and addresses from ``text``, except for the prose in them (``_blank``)."""
    pieces = _FENCE.split(text)
    text = "".join(piece if at % 2 == 0 else _blank(piece) for at, piece in enumerate(pieces))
    for opener, closer in _PAIRS:  # an opener that is never closed is left as it is
        kept = []
        at = 0
        while (start := text.find(opener, at)) >= 0 and (end := text.find(closer, start + len(opener))) >= 0:
            kept += [text[at:start], _blank(text[start + len(opener) : end])]
            at = end + len(closer)
        text = "".join([*kept, text[at:]])
    for pattern in (_INLINE_CODE, _DISPLAY, _FORMULA, _ADDRESS):
        text = pattern.sub(lambda match: _blank(match.group()), text)
    text = _PROSE_IN_FORMULA.sub(r" \1 ", text)
    return _LATEX_COMMAND.sub(" ", _LATEX_NAME.sub(" ", text))


def _blank(span: str) -> str:
    """Return what is prose in a span of code or formulas: texts in ``\\text{…}``, and all that is neither Latin nor
    Greek."""
    prose = " ".join(_PROSE_IN_FORMULA.findall(span))
    rest = ""
    if not span.isascii():
        rest = _LATIN_OR_GREEK.sub(" ", _PROSE_IN_FORMULA.sub(" ", span))
    return f" {prose} {rest} "


@lru_cache(maxsize=65_536)
def _mixed_words(token: str) -> tuple[Word, ...]:
    """Return the words of a token that has a character beyond ASCII, cut where the script changes. In a token with a
    digit or an underscore, such as a name in code, the Latin pieces are left out."""
    pieces = _script_runs(token)
    has_digit = any(group is None for group, _ in pieces)
    return tuple(
        word
        for group, piece in pieces
        if group is not None and not (has_digit and group == "latin")
        for word in _piece_words(piece, group)
    )


def _piece_words(piece: str, group: str) -> list[Word]:
    """Return the word that a piece of one script is, in a list; an empty list for a symbol or a neutral word."""
    folded = piece.casefold().replace("’", "'").strip("'")
    # a single consonant a–z or a single Greek letter is a symbol
    symbol = len(folded) == 1 and folded not in LETTER_WORDS and (folded.isascii() or group == "greek")
    if not folded or folded in _NEUTRAL_WORDS or symbol:
        return []
    return [Word(folded, group, piece[0].isupper())]


def _script_runs(token: str) -> list[tuple[str | None, str]]:
    """Cut ``token`` where the script changes, into (script group, piece). Digits, underscores and the like have the
    group ``None``; marks, apostrophes and joiners belong to the letters before them."""
    runs: list[tuple[str | None, str]] = []
    for letter in token:
        group: str | None = None
        if letter.isalpha() or letter in "々〆ー":
            group = _UNICODE_NAMES.get(unicodedata.name(letter, "").split(" ", 1)[0], OTHER)
        if unicodedata.category(letter)[0] == "M" or letter in "'’\u200c\u200d":
            if not runs:
                continue
            group = runs[-1][0]
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1] + letter)
        else:
            runs.append((group, letter))
    return runs


Likelihoods = NDArray[np.float64]

UNSEEN = 1e-7
"""Frequency of a word in a language whose list does not have it. The lists end at 1e-6, a word in a million."""
LISTED = 5e-7
"""Frequency above which a language is taken to have a word in its list: between ``UNSEEN`` and the lists' least one."""
FOREIGN = 3e-7
"""Likelihood p(w | no language we know). A word that no language explains better counts as ``other``."""
NAME, KNOWN_NAME = 1e-5, 1e-3
"""Likelihood that is added to every language, and to ``other``, for a capitalised word: "The" keeps its evidence, while
a name counts for the language of its text. ``KNOWN_NAME`` is for words in half of the lists (José, but no German
noun)."""
LONGEST_WORD = 40
RARE_CHARACTER = log(1e-6)
TRADITIONAL = 0.3  # a character in its traditional form, beside its simplified one
HAN_IN_JAPANESE = log(0.45)  # about that share of Japanese characters is Han; counted for three characters of a run
KANA_IN_CHINESE = log(1e-3)
MAX_GUESSED = 250
"""Largest number of different unlisted words of one text that lingua is asked for (0.3 ms each). The others are equally
likely in all languages."""


def word_likelihoods(words: Sequence[Word], group: str) -> Likelihoods:
    """Return p(word | language), ``[W, L + 1]``: a column for each language of ``group`` in order, the last for
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
    """Return p(run | language), ``[W, L + 1]`` as in ``word_likelihoods``, for unbroken runs of Han and kana.

    A run is taken to be in one language, with p(run | language) = Π p(character | language). Values are divided by that
    of the run's likeliest language: only ratios matter, and the product of a long run underflows.
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
    """Return log p(character | language) for Han characters and kana.

    Han characters have their frequencies in the word list, normalised among themselves. A kana has the value 0 in
    Japanese and ``KANA_IN_CHINESE`` in Chinese. Normalised together with kana, Han characters would be so rare in
    Japanese that a text with few kana would be taken for Chinese.
    """
    frequency: dict[str, float] = {}
    for word, weight in _frequencies(language).items():
        for character in word:
            if "\u3400" <= character <= "\u9fff":
                frequency[character] = frequency.get(character, 0.0) + weight
    if language == "zh":  # the list is in simplified characters
        path = Path(_offline_library("wordfreq").__file__).parent / "data" / "_chinese_mapping.msgpack.gz"
        packed = _offline_library("msgpack").loads(gzip.decompress(path.read_bytes()), strict_map_key=False)
        for code, simplified in packed.items():  # wordfreq's function for it would need jieba
            if isinstance(simplified, str):
                frequency.setdefault(chr(code), TRADITIONAL * frequency.get(simplified, 0.0))
    total = sum(frequency.values())
    logs = {character: max(log(max(weight, 1e-12) / total), RARE_CHARACTER) for character, weight in frequency.items()}
    kana = 0.0
    if language != "ja":
        kana = KANA_IN_CHINESE
    return logs | {chr(code): kana for code in range(0x3041, 0x3100)}


@lru_cache(maxsize=100_000)
def _listed(word: str, languages: tuple[str, ...]) -> Likelihoods | None:
    """Return a word's frequency in each language, ``[L]``, ``UNSEEN`` where the list lacks it; None if all lists do.

    A word with an apostrophe that no list has counts as its last part of more than one letter.
    """
    lists = [_frequencies(language) for language in languages]
    forms = [word]
    if "'" in word:  # French and Italian lists hold the parts of l'homme, the English one don't as a whole
        forms += [part for part in word.split("'") if len(part) > 1][-1:]
    found = ([words.get(form, 0.0) for words in lists] for form in forms)
    return next((np.maximum(np.array(seen), UNSEEN) for seen in found if any(seen)), None)


@lru_cache(maxsize=100_000)
def _guessed(word: str, languages: tuple[str, ...]) -> Likelihoods:
    """Return the frequency of an unlisted word in each language, ``[L]``: shares by lingua's confidences, with the mean
    ``UNSEEN``.

    The last bits of the confidences differ from call to call, since lingua adds up in the order of a hash map. They are
    rounded off.
    """
    values = _detector(languages).compute_language_confidence_values(word)
    confidences = {value.language.iso_code_639_1.name.lower(): round(value.value, 9) for value in values}
    shares: Likelihoods = np.array([confidences[language] for language in languages]) + 0.02
    guess: Likelihoods = UNSEEN * len(languages) * shares / shares.sum()
    return guess


@cache
def _frequencies(language: str) -> dict[str, float]:
    """Load wordfreq's list of a language: word → share of all words."""
    words: dict[str, float] = _offline_library("wordfreq").get_frequency_dict(language, "small")
    return words


@cache
def _detector(languages: tuple[str, ...]) -> Any:
    """Build lingua's detector of these languages."""
    lingua = _offline_library("lingua")
    codes = [getattr(lingua.IsoCode639_1, language.upper()) for language in languages]
    # Trigram models only: 30 MB instead of 500 for the Latin languages, and unlisted words are rarely short.
    return lingua.LanguageDetectorBuilder.from_iso_codes_639_1(*codes).with_low_accuracy_mode().build()


def _offline_library(name: str) -> Any:
    """Import a library of the extra ``language``. Raises ImportError that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            "LanguageConsistencyReward distinguishes languages of one script with wordfreq and "
            f"lingua-language-detector, and {name!r} cannot be imported here ({error}). Install them: "
            "pip install 'grpo_lab[language]'"
        ) from error
