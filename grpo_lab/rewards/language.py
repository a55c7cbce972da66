"""DeepSeek-R1's language consistency reward: the share of the reasoning's words that are in the target language.

    reward = words of the reasoning in the target language / words of the reasoning      ∈ [0, 1]

Source: DeepSeek-R1, arXiv 2501.12948, section 2.3.2: RL on a model that mixes languages in its chain of thought. The
reward is added directly to the accuracy reward. It costs a little accuracy (same section), so look at both.

The paper says neither what a word is nor how its language is found. Ours (how well it works:
``docs/algorithms/language_consistency.md``) first finds the script of each word (``words``). Within a script that
several languages share, it then fits the mixture of languages that explains the words best. A single word often belongs
to several languages ("no", "animal", "a"); a text hardly ever does. With p(w | l) from ``words`` the shares π are those
that make the text most likely,

    π* = argmax_π Σ_w n_w log Σ_l π_l p(w | l),

found by expectation maximisation: r_wl = π_l p(w | l) / Σ_k π_k p(w | k), then π_l = Σ_w n_w r_wl / Σ_w n_w. Ambiguous
words then follow the unambiguous ones, wherever they stand. π_l is the expected share of words in language l.

EM for mixture weights: Dempster, Laird, Rubin 1977, section 4.3. To estimate R1's share in this way is our choice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grpo_lab.rewards.completion import completion_text, reasoning_in
from grpo_lab.rewards.words import (
    CASED,
    GROUP_OF_LANGUAGE,
    LANGUAGES_OF_GROUP,
    LETTER_WORDS,
    OTHER,
    UNSPACED,
    Word,
    has_kana,
    known_languages,
    word_likelihoods,
    words_of,
)

FROM_PROMPT = "prompt"
Array = NDArray[np.float64]


class LanguageConsistencyReward:
    """Reward the share of the reasoning's words that are in the target language, in [0, 1].

    Args:
        target: a language code (``en``, ``zh``, …; ``words.known_languages()`` lists them), or ``"prompt"``: the
            language that most words of the row's prompt are in. A prompt whose language is not clear (formulas only,
            two languages in equal parts) makes the row unscorable: ``None``.
        empty: the value of reasoning without a single countable word. 0 by default: with 1, the easiest way to avoid
            mixed languages would be no reasoning.
        prompt_column: with ``target="prompt"``, the column to read instead, if the prompt has other text around the
            question.
    """

    __name__ = "language_consistency_reward"

    def __init__(self, target: str = "en", empty: float = 0.0, prompt_column: str | None = None) -> None:
        code = str(target).replace("_", "-").split("-")[0].lower()
        if code != FROM_PROMPT and code not in GROUP_OF_LANGUAGE:
            raise ValueError(f"`target` must be 'prompt' or one of {known_languages()}; got {target!r}")
        if not (math.isfinite(empty) and 0.0 <= empty <= 1.0):
            raise ValueError(f"`empty` is the reward of wordless reasoning and must be in [0, 1]; got {empty!r}")
        if prompt_column is not None and code != FROM_PROMPT:
            raise ValueError(f"`prompt_column={prompt_column!r}` has no effect with target={target!r}, only 'prompt'")
        self.target = code
        self.empty = float(empty)
        self.prompt_column = prompt_column

    def __repr__(self) -> str:
        return f"LanguageConsistencyReward(target={self.target!r}, empty={self.empty})"

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return the shares in order; None where the language of a row's prompt is not clear."""
        if completions is None:
            raise ValueError("LanguageConsistencyReward needs completions=[…]; got none")
        targets: list[str | None] = [self.target] * len(completions)
        if self.target == FROM_PROMPT:
            if self.prompt_column is None:
                questions = prompts
            else:
                questions = columns.get(self.prompt_column)
            if questions is None or len(questions) != len(completions):
                if self.prompt_column is None:
                    where = "`prompts`"
                else:
                    where = f"the column {self.prompt_column!r}"
                raise ValueError(
                    f"LanguageConsistencyReward(target='prompt') needs {where}, one for each of {len(completions)} "
                    "completions"
                )
            targets = [_language_of(_last_question(question)) for question in questions]
        values: list[float | None] = [None] * len(completions)
        for row, (completion, target) in enumerate(zip(completions, targets)):
            if target is not None:
                found = language_shares(reasoning_in(completion), expected=target)
                values[row] = min(1.0, found.shares.get(target, 0.0)) if found.words else self.empty
        return values


@lru_cache(maxsize=4096)
def _language_of(question: str) -> str | None:
    """Return the language of more than half of a question's words; None if there is none."""
    return language_shares(question).dominant()


def _last_question(prompt: Any) -> str:
    """Return the text of a prompt; of a message list, that of its last user message."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") == "user"]
    if asked:
        return completion_text([{**asked[-1], "role": "assistant"}])
    return ""


ITERATIONS = 100
TOLERANCE = 1e-4
TRACE = 0.02
"""A language is dropped if it explains less than this share of the words, or less than ``TRACE_WORDS`` words."""
TRACE_WORDS = 1.0
DOUBT = 2.0
"""Number of imagined words in the expected language, a prior of the mixture. By them a text of three ambiguous words
belongs to that language, not to the one whose frequencies happen to fit best. They only decide between languages that
fit, and are not counted themselves: no French word becomes English by them."""


def mixture_shares(likelihoods: Array, counts: Array, expected: int | None = None) -> Array:
    """Compute the share of each language in the counted words, ``[L]``, summing to 1.

    Args:
        likelihoods: ``[W, L]``, p(w | l) > 0.
        counts: ``[W]``, how often each word occurs.
        expected: index of a language that gets the benefit of the doubt, see ``DOUBT``.
    """
    if likelihoods.ndim != 2 or likelihoods.shape[0] != counts.shape[0] or not counts.sum() > 0:
        raise ValueError(f"one row of likelihoods per counted word: got {likelihoods.shape} and {counts.shape}")
    languages = likelihoods.shape[1]
    prior = np.zeros(languages)
    if expected is not None:
        prior[expected] = DOUBT
    shares = _maximise(likelihoods, counts, prior, np.full(languages, 1 / languages))
    kept = shares >= max(TRACE, min(0.3, TRACE_WORDS / counts.sum()))
    if kept.any() and not kept.all():
        # Twenty languages that each claim two odd words of a long text are not there: explain those words by the rest.
        shares = _maximise(likelihoods, counts, np.where(kept, prior, 0.0), np.where(kept, shares, 0.0))
    return shares


def _maximise(likelihoods: Array, counts: Array, prior: Array, start: Array) -> Array:
    """Run expectation maximisation, and return the share of each language in the counted words, ``[L]``.

    Args:
        likelihoods: ``[W, L]``, and ``counts`` ``[W]``, as in ``mixture_shares``.
        prior: ``[L]``, imagined words of each language. They move the weights, but are not in the returned shares.
        start: ``[L]``, initial weights, not normalised. A language that starts at 0 stays there.
    """
    weights: Array = start / start.sum()
    shares = weights
    for _ in range(ITERATIONS):
        joint = likelihoods * weights
        explained = (counts / joint.sum(axis=1)) @ joint
        shares = explained / counts.sum()
        previous = weights
        weights = (explained + prior) / (counts.sum() + prior.sum())
        if np.abs(weights - previous).max() < TOLERANCE:
            break
    return shares


CAPITALS_PER_WORD = 0.6
"""Number of capitalised words that prose explains for each other word (German has the most: about 0.5)."""
LETTERS_PER_WORD = 0.15
"""Number of one-letter words that Latin prose explains for each other word (Portuguese has the most: about 0.12)."""
MOST_NAMES = 0.15
"""Largest share of a text's words that is left out as names in a foreign script."""


class LanguageShares(NamedTuple):
    """The languages of a text.

    Attributes:
        words: number of countable words (an estimate for scripts without spaces).
        shares: share of each language in these words, summing to 1; empty without words.
    """

    words: float
    shares: Mapping[str, float]

    def dominant(self) -> str | None:
        """Return the language of more than half of the words; None if no language has so many, or no known one."""
        best = max(self.shares, key=lambda language: self.shares[language], default=OTHER)
        if best != OTHER and self.shares[best] > 0.5:
            return best
        return None


def language_shares(text: str, expected: str | None = None) -> LanguageShares:
    """Compute the share of each language in the words of ``text``.

    Words that fit several languages equally count for ``expected``, the code of a language (see ``DOUBT``).
    """
    groups: dict[str, list[Word]] = {}
    letters = 0
    for word in words_of(text):
        if word.text in LETTER_WORDS:
            letters += 1
        else:
            groups.setdefault(word.group, []).append(word)
    sizes = _sizes_without_foreign_names(groups)
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
    """Return the shares of languages, summing to 1, in the words of one script group."""
    languages = LANGUAGES_OF_GROUP.get(group, (OTHER,))
    if len(languages) == 1:
        return {languages[0]: 1.0}
    counted = Counter(words)
    counts = np.array([count * _words_in(word) for word, count in counted.items()], dtype=np.float64)
    place = None
    if expected in languages:
        place = languages.index(expected)
    shares = mixture_shares(word_likelihoods(list(counted), group), counts, place)
    return {language: float(share) for language, share in zip((*languages, OTHER), shares) if share > 0}


def _words_in(word: Word) -> int:
    """Return how many words a ``Word`` counts for: 1 or, for a run of characters in a script without spaces, its length
    divided by the characters of a word, at least 1."""
    if word.group not in ("cjk", "thai"):
        return 1
    if word.group == "thai":
        language = "th"
    elif has_kana(word.text):
        language = "ja"
    else:
        language = "zh"
    return max(1, round(len(word.text) / UNSPACED[language]))


def _sizes_without_foreign_names(groups: Mapping[str, Sequence[Word]]) -> dict[str, float]:
    """Count the words of each script group, leaving out names in a foreign script: "John" in Chinese prose says nothing
    about its language.

    In a script that is not the text's main one, capitalised words count as names, except as many as the lower-case
    words of that script explain (``CAPITALS_PER_WORD``). At most ``MOST_NAMES`` of all words are left out; otherwise
    prose In Capitals Like This would cost nothing.
    """
    sizes = {group: float(sum(map(_words_in, words))) for group, words in groups.items()}
    main = max(sizes, key=lambda group: sizes[group], default=OTHER)
    forgivable = MOST_NAMES * sum(sizes.values())
    for group in sorted(CASED & sizes.keys() - {main}):
        capitals = sum(word.capitalised for word in groups[group])
        names = max(0.0, capitals - CAPITALS_PER_WORD * (len(groups[group]) - capitals))
        forgiven = min(names, forgivable)
        forgivable -= forgiven
        sizes[group] -= forgiven
    return sizes
