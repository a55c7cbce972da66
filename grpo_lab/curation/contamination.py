"""Training rows that an evaluation set already knows, with the item that knows them and the reason.

A text is contaminated by an evaluation item if one of these holds, tried in this order on normalised words
(`duplicates.words_of`):

exact          the same words in the same order
ngram          a run of 13 words in common (13 as in GPT-3, arXiv 2005.14165, appendix C)
other_numbers  the same words once every number is masked, with at least 6 words that are no numbers
masked_ngram   a run of 13 words in common once numbers are masked, at least 9 of them no numbers
near           Indel similarity of the masked words, 2·LCS/(a + b) for lengths a and b, of at least 0.7

Short texts share runs by chance: an item of fewer than 13 words is "contained" only where it makes up at least half of
the text, and below 20 words (on either side) "near" takes 0.85. The published recipes stop at n-grams; the last three
rules are ours, with thresholds chosen on GSM8K (docs/choosing_the_data.md). "near" compares every text with every item
(rapidfuzz): nothing is lost to an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from grpo_lab.curation.duplicates import MASK, masked, words_of

Reason = Literal["exact", "ngram", "other_numbers", "masked_ngram", "near"]

_CONTENT_WORDS_IN_TEMPLATE: Final = 6  # "what is # + #" has three and is nobody's problem in particular
_CONTENT_SHARE_OF_NGRAM: Final = 9 / 13
_SHORT: Final = 20  # words
_SIMILARITY_OF_SHORT: Final = 0.85
_CELLS_AT_ONCE: Final = 4_000_000  # of the similarity matrix, 16 MB


@dataclass(frozen=True)
class Contamination:
    """Why a text is contaminated: `item` is the index into `against`, `evidence` the words shared, `similarity` in
    [0, 1] is of the masked words and 1.0 for equal ones."""

    item: int
    reason: Reason
    evidence: str
    similarity: float


def contaminated(
    texts: Sequence[str], against: Sequence[str], *, ngram: int = 13, similarity: float = 0.7
) -> list[bool]:
    """Which of `texts` an evaluation set `against` already knows; settings as in `EvaluationIndex`."""
    return [found is not None for found in find_contamination(texts, against, ngram=ngram, similarity=similarity)]


def find_contamination(
    texts: Sequence[str], against: Sequence[str], *, ngram: int = 13, similarity: float = 0.7
) -> list[Contamination | None]:
    """Like `contaminated`, with the matched item and the reason for every contaminated text."""
    if isinstance(texts, str):
        raise ValueError("texts is one str; a list of texts is expected")
    return list(EvaluationIndex(against, ngram=ngram, similarity=similarity).find(texts))


class EvaluationIndex:
    """An evaluation set, prepared once for a stream of texts of any length.

    Args:
        against: the evaluation questions.
        ngram: words in a run that counts as copied, at least 5.
        similarity: least Indel similarity of masked words that counts as a near duplicate, in (0.5, 1].
        workers: threads of the near-duplicate search.
    Raises: ValueError for settings out of range or items that are not strings.
    """

    def __init__(self, against: Sequence[str], *, ngram: int = 13, similarity: float = 0.7, workers: int = 1) -> None:
        if isinstance(against, str):
            raise ValueError("against is one str; a list of evaluation questions is expected")
        if ngram < 5:
            raise ValueError(f"ngram={ngram}: runs of fewer than 5 words are shared by chance; at least 5")
        if not 0.5 < similarity <= 1:
            raise ValueError(f"similarity={similarity} is not in (0.5, 1]")
        self.ngram, self.similarity, self.workers = ngram, similarity, workers
        self._codes: dict[str, str] = {}
        self._exact: dict[str, int] = {}
        self._wordless: dict[str, int] = {}
        self._templates: dict[str, int] = {}
        self._runs: dict[str, int] = {}
        self._masked_runs: dict[str, int] = {}
        self._short_items: dict[int, dict[str, int]] = {}
        self._items: list[str] = []
        for item, text in enumerate(against):
            self._add(item, text)

    def find(self, texts: Iterable[str]) -> Iterator[Contamination | None]:
        """One result a text, in order; reads ahead by one block."""
        stream = iter(texts)
        size = max(1, min(4096, _CELLS_AT_ONCE // max(1, len(self._items))))
        while block := list(islice(stream, size)):
            yield from self._find_in_block(block)

    def _add(self, item: int, text: str) -> None:
        words = words_of(_checked(text))
        hidden = masked(words)
        for word in (*words, *hidden):
            self._codes.setdefault(word, _letter(len(self._codes)))
        plain, template = self._encoded(words), self._encoded(hidden)
        self._items.append(template)
        if not words:
            if text.strip():
                self._wordless.setdefault(text.strip(), item)
            return
        self._exact.setdefault(plain, item)
        if len(words) < self.ngram:
            self._short_items.setdefault(len(words), {}).setdefault(plain, item)
        if self._says_something(template, _CONTENT_WORDS_IN_TEMPLATE):
            self._templates.setdefault(template, item)
        for run in _runs(plain, self.ngram):
            self._runs.setdefault(run, item)
        for run in _runs(template, self.ngram):
            if self._says_something(run, _CONTENT_SHARE_OF_NGRAM * self.ngram):
                self._masked_runs.setdefault(run, item)

    def _find_in_block(self, texts: list[str]) -> list[Contamination | None]:
        found: list[Contamination | None] = []
        templates: list[str] = []
        for text in texts:
            words = words_of(_checked(text))
            template = self._encoded(masked(words))
            found.append(self._copied(text, words, template))
            templates.append(template)
        if self._items:
            unsure = [row for row, result in enumerate(found) if result is None]
            for row, result in zip(unsure, self._near([templates[row] for row in unsure]), strict=True):
                found[row] = result
        return found

    def _copied(self, text: str, words: list[str], template: str) -> Contamination | None:
        """The rules that look words up: exact, ngram, other_numbers, masked_ngram."""
        plain = self._encoded(words)
        if not words:
            item = self._wordless.get(text.strip())
            return None if item is None else Contamination(item, "exact", text.strip()[:80], 1.0)
        if (item := self._exact.get(plain)) is not None:
            return Contamination(item, "exact", " ".join(words[: self.ngram]), 1.0)
        for position, run in enumerate(_runs(plain, self.ngram)):
            if (item := self._runs.get(run)) is not None:
                return self._result(item, "ngram", words[position : position + self.ngram], template)
        for length, items in self._short_items.items():
            if length >= 5 and 2 * length >= len(words):
                for position, run in enumerate(_runs(plain, length)):
                    if (item := items.get(run)) is not None:
                        return self._result(item, "ngram", words[position : position + length], template)
        if (item := self._templates.get(template)) is not None:
            return self._result(item, "other_numbers", masked(words), template)
        for position, run in enumerate(_runs(template, self.ngram)):
            if (item := self._masked_runs.get(run)) is not None:
                return self._result(item, "masked_ngram", masked(words)[position : position + self.ngram], template)
        return None

    def _near(self, templates: list[str]) -> list[Contamination | None]:
        import numpy
        from rapidfuzz import process
        from rapidfuzz.distance import Indel

        if not templates:
            return []
        table = process.cdist(
            templates,
            self._items,
            scorer=Indel.normalized_similarity,
            score_cutoff=min(self.similarity, _SIMILARITY_OF_SHORT),
            dtype=numpy.float32,
            workers=self.workers,
        )
        item_lengths = numpy.array([len(item) for item in self._items])
        strict = max(self.similarity, _SIMILARITY_OF_SHORT)
        results: list[Contamination | None] = [None] * len(templates)
        for row in numpy.flatnonzero(table.max(axis=1) > 0).tolist():
            short = numpy.minimum(item_lengths, len(templates[row])) < _SHORT
            enough = table[row] >= numpy.where(short, strict, self.similarity) - 1e-6
            item = int(numpy.where(enough, table[row], -1).argmax())
            if enough[item] and self._says_something(templates[row], _CONTENT_WORDS_IN_TEMPLATE):
                score = float(table[row, item])
                results[row] = Contamination(item, "near", f"similarity {score:.2f} with numbers masked", score)
        return results

    def _result(self, item: int, reason: Reason, evidence: list[str], template: str) -> Contamination:
        from rapidfuzz.distance import Indel

        score = Indel.normalized_similarity(template, self._items[item])
        return Contamination(item, reason, " ".join(evidence[:40]), float(score))

    def _encoded(self, words: list[str]) -> str:
        """One character a word, so that a run of words is a substring; `\\0` for words the evaluation set has not."""
        codes = self._codes
        return "".join([codes.get(word, "\0") for word in words])

    def _says_something(self, template: str, content_words: float) -> bool:
        return len(template) - template.count(self._codes.get(MASK, "\0")) >= content_words


def _runs(encoded: str, length: int) -> Iterator[str]:
    return (encoded[start : start + length] for start in range(len(encoded) - length + 1))


def _letter(number: int) -> str:
    """The character that stands for word `number`: 1, 2, … without the surrogates; above 1.1 million they repeat."""
    code = 1 + number % 1_100_000
    return chr(code if code < 0xD800 else code + 0x800)


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"a text is a {type(text).__name__}; every text and evaluation item has to be a str")
    return text
