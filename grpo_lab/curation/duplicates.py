"""Find repeated questions: within one data set (`deduplicate`), or shared with an evaluation set
(`find_contamination`).

Texts are compared as lists of normalised words: Unicode NFKC, case folded, without mark-up and punctuation. `1,000` and
`1000` are the same word, and every Chinese or Japanese character is one word. In masked words every number, in digits
or in English words, is `#`, so the same problem with other numbers gives the same list. Similarity is the normalised
Indel similarity, 2·LCS/(a + b) for lists of a and b words.

**Duplicates** have the same words, or a similarity of at least 0.85; numbers are not masked here. Candidates come from
MinHash LSH over 3-word shingles (datasketch) and are measured exactly (rapidfuzz): LSH can miss a pair, never invent
one. A row is compared only with rows that were kept: in a chain a ~ b ~ c, b is dropped, and c only if it is close to
a.

A text is **contaminated** if one of these rules finds an item of the evaluation set that it repeats. They are tried in
this order:

exact          the same words in the same order
ngram          13 consecutive words in common (13 as in GPT-3, arXiv 2005.14165, appendix C)
other_numbers  the same masked words, at least 6 of them not numbers
masked_ngram   13 consecutive masked words in common, at least 9 of them not numbers
near           similarity of the masked words of at least 0.7

Short texts share such runs by chance. So an item of 5 to 12 words, which has no run of 13, must be contained as a whole
and make up at least half of the text ("ngram"). If text or item has fewer than 20 words, "near" needs 0.85. The
published recipes stop at n-grams; the last three rules are ours, with thresholds chosen on GSM8K
(docs/choosing_the_data.md). "near" compares every text with every item (rapidfuzz), without an index that could miss
one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

MASK: Final = "#"
#: SIMILAR is the word similarity from which on two texts are near duplicates. The other two are the similarity, and the
#: number of words in a row, from which on a text repeats an item of an evaluation set.
SIMILAR = 0.85
KNOWN = 0.7
NGRAM = 13

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
    "half third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh eighth eighths ninth tenth "
    "tenths once twice thrice double triple quadruple first second"
)
_NUMBER_WORDS: Final = frozenset(_NUMBERS.split())


def words_of(text: str) -> list[str]:
    """Return the normalised words of any text, in order, in time linear in its length."""
    if not isinstance(text, str):
        raise ValueError(f"a text is a {type(text).__name__}; every text and evaluation item has to be a str")
    found = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    words = (word.replace(",", "") for word in found if word not in _MARKUP)
    return [_SAME_WORD.get(word, word).replace("’", "'") for word in words]


def masked(words: list[str]) -> list[str]:
    """Return the words with every number replaced by `MASK`. Numbers that follow each other (`twenty five`) become one
    mask."""
    result: list[str] = []
    for word in words:
        if not (word[0].isdigit() or word in _NUMBER_WORDS):
            result.append(word)
        elif result[-1:] != [MASK]:
            result.append(MASK)
    return result


_SHINGLE: Final = 3  # words
_PERMUTATIONS: Final = 128
_WORDS_READ: Final = 20_000  # at most, of one text, for its signature and comparison


class Duplicate(NamedTuple):
    """A row that is dropped as a duplicate.

    Attributes:
        row: its index.
        of: index of the kept row that it repeats.
        similarity: similarity of their words, in [0, 1]; 1.0 for the same words.
    """

    row: int
    of: int
    similarity: float


class Deduplicated(NamedTuple):
    """Result of `deduplicate`.

    Attributes:
        keep: for each row whether it is kept.
        pairs: one entry for each dropped row, in their order.
    """

    keep: list[bool]
    pairs: list[Duplicate]


def deduplicate(texts: Sequence[str], *, similarity: float = SIMILAR) -> Deduplicated:
    """Choose which texts to keep: a text that repeats an earlier kept one is dropped. The result says for each text
    whether it is kept, and for each dropped one what it repeats.

    Args:
        similarity: least word similarity of a near duplicate, in [0.6, 1]; 1.0 drops exact duplicates only.

    Raises ValueError if `similarity` is out of range or a text is not a string.
    """
    if not 0.6 <= similarity <= 1:
        raise ValueError(f"similarity={similarity} is not in [0.6, 1]; below 0.6 the candidate search misses pairs")
    rows = [words_of(text) for text in texts]
    first: dict[object, int] = {}
    copies: list[Duplicate] = []
    for row, (text, words) in enumerate(zip(texts, rows, strict=True)):
        of = first.setdefault(tuple(words) or text.strip(), row)  # a text of symbols only is itself its key
        if of != row:
            copies.append(Duplicate(row, of, 1.0))
    near = {}
    if similarity < 1:
        near = _near(rows, list(first.values()), similarity)
    # an exact copy of a row that itself went repeats the row that stays
    pairs = [*near.values(), *(near.get(copy.of, copy)._replace(row=copy.row) for copy in copies)]
    gone = {pair.row for pair in pairs}
    return Deduplicated([row not in gone for row in range(len(rows))], sorted(pairs))


def _near(rows: list[list[str]], distinct: list[int], similarity: float) -> dict[int, Duplicate]:
    """Find near duplicates among the rows with the indices `distinct`, and return them by row.

    In order, each row is compared with the kept rows that MinHash LSH proposes. It is dropped as a duplicate of the
    most similar one with at least `similarity`, or kept.
    """
    from datasketch import MinHash, MinHashLSH
    from rapidfuzz.distance import Indel

    # A changed word breaks up to three shingles. If a share d = 1 − similarity of the words is changed, about
    # s = 1 − 3d of the shingles survive on each side, and their Jaccard similarity is s / (2 − s). The threshold is 0.7
    # of that, to leave room for clustered and for scattered changes.
    survives = max(0.2, 1 - _SHINGLE * (1 - similarity))
    threshold = max(0.1, 0.7 * survives / (2 - survives))
    lsh = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS, weights=(0.2, 0.8))
    template = MinHash(num_perm=_PERMUTATIONS, seed=1)
    pairs: dict[int, Duplicate] = {}
    for row in distinct:
        words = rows[row][:_WORDS_READ]
        if not words:
            continue
        length = min(_SHINGLE, len(words))
        shingles = set(zip(*(words[start:] for start in range(length)), strict=False))
        signature = template.copy()
        signature.update_batch([" ".join(shingle).encode() for shingle in shingles])
        best = Duplicate(row, -1, 0.0)
        for candidate in sorted(lsh.query(signature)):
            score = Indel.normalized_similarity(words, rows[candidate][:_WORDS_READ], score_cutoff=similarity)
            if score > best.similarity:
                best = Duplicate(row, candidate, float(score))
        if best.of >= 0:
            pairs[row] = best
        else:
            lsh.insert(row, signature)
    return pairs


Reason = Literal["exact", "ngram", "other_numbers", "masked_ngram", "near"]

_CONTENT_WORDS_IN_TEMPLATE: Final = 6  # "what is # + #" has three, and many texts share it
_CONTENT_SHARE_OF_NGRAM: Final = 9 / 13
_SHORT: Final = 20  # words
_SIMILARITY_OF_SHORT: Final = 0.85
_CELLS_AT_ONCE: Final = 4_000_000  # of the similarity matrix, 16 MB


@dataclass(frozen=True)
class Contamination:
    """The evaluation item that a text repeats, and why.

    Attributes:
        item: index of the item in `against`.
        reason: name of the rule that found it.
        evidence: the shared words, or for `near` the similarity in words.
        similarity: similarity of the masked words, in [0, 1]; 1.0 if they are equal.
    """

    item: int
    reason: Reason
    evidence: str
    similarity: float


def contaminated(
    texts: Sequence[str], against: Sequence[str], *, ngram: int = NGRAM, similarity: float = KNOWN
) -> list[bool]:
    """Return for each text whether it repeats an item of the evaluation set `against` (`find_contamination`)."""
    return [found is not None for found in find_contamination(texts, against, ngram=ngram, similarity=similarity)]


def find_contamination(
    texts: Sequence[str], against: Sequence[str], *, ngram: int = NGRAM, similarity: float = KNOWN
) -> list[Contamination | None]:
    """Return for each text an evaluation item that it repeats, with the reason, or None if there is none.

    Args:
        against: the evaluation questions.
        ngram: number of consecutive shared words that counts as copied, at least 5.
        similarity: least similarity of masked words that counts as a near duplicate, in (0.5, 1].

    Raises ValueError if a setting is out of range or an item is not a string.
    """
    for name, given in (("texts", texts), ("against", against)):
        if isinstance(given, str):
            raise ValueError(f"{name} is one str; a list of texts is expected")
    if ngram < 5:
        raise ValueError(f"ngram={ngram}: runs of fewer than 5 words are shared by chance; at least 5")
    if not 0.5 < similarity <= 1:
        raise ValueError(f"similarity={similarity} is not in (0.5, 1]")
    index = _EvaluationIndex(against, ngram, similarity)
    at_once = max(1, min(4096, _CELLS_AT_ONCE // max(1, len(against))))
    blocks = (texts[start : start + at_once] for start in range(0, len(texts), at_once))
    return [found for block in blocks for found in index.find(block)]


class _EvaluationIndex:
    """Index of the items of an evaluation set. Words are encoded as single characters, so that a list of words is a
    string, and a run of words a substring.

    Attributes:
        _codes: word → its character.
        _exact: encoded words of a whole item → the item.
        _wordless: text of an item without words → the item.
        _templates: encoded masked words of a whole item → the item.
        _runs: length → runs of so many words → the item. A run shorter than `ngram` is a whole item.
        _masked_runs: runs of `ngram` masked words → the item.
        _items: encoded masked words of each item.
    """

    def __init__(self, against: Sequence[str], ngram: int, similarity: float) -> None:
        self.ngram = ngram
        self.similarity = similarity
        self._codes: dict[str, str] = {}
        self._exact: dict[str, int] = {}
        self._wordless: dict[str, int] = {}
        self._templates: dict[str, int] = {}
        self._runs: dict[int, dict[str, int]] = {ngram: {}}
        self._masked_runs: dict[str, int] = {}
        self._items: list[str] = []
        for item, text in enumerate(against):
            self._add(item, text)

    def find(self, texts: Sequence[str]) -> list[Contamination | None]:
        """Return for each text the item that it repeats, or None. Texts that the look-up rules do not find are measured
        against all items ("near")."""
        words = [words_of(text) for text in texts]
        templates = [self._encoded(masked(one)) for one in words]
        found = [self._copied(*one) for one in zip(texts, words, templates, strict=True)]
        unsure = [row for row, result in enumerate(found) if result is None]
        for row, result in zip(unsure, self._similar([templates[row] for row in unsure]), strict=True):
            found[row] = result
        return found

    def _add(self, item: int, text: str) -> None:
        """Enter an item into the dictionaries. Of items with the same words the first one stays."""
        words = words_of(text)
        hidden = masked(words)
        for word in (*words, *hidden):  # word number n is the character 1 + n without the surrogates
            code = 1 + len(self._codes) % 1_100_000
            self._codes.setdefault(word, chr(code if code < 0xD800 else code + 0x800))
        plain = self._encoded(words)
        template = self._encoded(hidden)
        self._items.append(template)
        if not words:
            if text.strip():
                self._wordless.setdefault(text.strip(), item)
            return
        self._exact.setdefault(plain, item)
        length = min(len(words), self.ngram)
        for run in _runs_of(plain, length):
            self._runs.setdefault(length, {}).setdefault(run, item)
        if self._says_something(template, _CONTENT_WORDS_IN_TEMPLATE):
            self._templates.setdefault(template, item)
        for run in _runs_of(template, self.ngram):
            if self._says_something(run, _CONTENT_SHARE_OF_NGRAM * self.ngram):
                self._masked_runs.setdefault(run, item)

    def _copied(self, text: str, words: list[str], template: str) -> Contamination | None:
        """Return the first match of the look-up rules: exact, ngram, other_numbers, masked_ngram."""
        plain = self._encoded(words)
        hidden = masked(words)
        if not words:
            item = self._wordless.get(text.strip())
            if item is None:
                return None
            return Contamination(item, "exact", text.strip()[:80], 1.0)
        if (item := self._exact.get(plain)) is not None:
            return Contamination(item, "exact", " ".join(words[: self.ngram]), 1.0)
        for length, items in self._runs.items():
            if length == self.ngram or (length >= 5 and 2 * length >= len(words)):
                for item, place in _hits(items, plain, length):
                    return self._result(item, "ngram", words[place : place + length], template)
        if (item := self._templates.get(template)) is not None:
            return self._result(item, "other_numbers", hidden, template)
        for item, place in _hits(self._masked_runs, template, self.ngram):
            return self._result(item, "masked_ngram", hidden[place : place + self.ngram], template)
        return None

    def _similar(self, templates: list[str]) -> list[Contamination | None]:
        """Return for each text, given by its encoded masked words, the most similar item by the rule "near", or
        None."""
        import numpy
        from rapidfuzz import process
        from rapidfuzz.distance import Indel

        results: list[Contamination | None] = [None] * len(templates)
        if not templates or not self._items:
            return results
        scorer = Indel.normalized_similarity
        least = min(self.similarity, _SIMILARITY_OF_SHORT)
        table = process.cdist(templates, self._items, scorer=scorer, score_cutoff=least, dtype=numpy.float32)
        item_lengths = numpy.array([len(item) for item in self._items])
        strict = max(self.similarity, _SIMILARITY_OF_SHORT)
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
        """Encode each word as one character, so that a run of words is a substring. A word that is not in the
        evaluation set becomes `\\0`."""
        return "".join([self._codes.get(word, "\0") for word in words])

    def _says_something(self, template: str, content_words: float) -> bool:
        """Return whether at least so many of the encoded masked words are no numbers."""
        return len(template) - template.count(self._codes.get(MASK, "\0")) >= content_words


def _runs_of(encoded: str, length: int) -> Iterator[str]:
    """Yield all runs of `length` consecutive words."""
    return (encoded[start : start + length] for start in range(len(encoded) - length + 1))


def _hits(items: Mapping[str, int], encoded: str, length: int) -> Iterator[tuple[int, int]]:
    """Yield (item, position) for each run of `length` words in ``encoded`` that ``items`` contains."""
    return ((items[run], place) for place, run in enumerate(_runs_of(encoded, length)) if run in items)
