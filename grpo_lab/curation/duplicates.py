"""Exact and near duplicates inside one set: keep the first row of each family.

Exact: the same normalised words. Near: Indel similarity of the words, 2·LCS/(a + b), of at least 0.85; numbers are
words like any other, so a problem that differs from a kept one in a single number goes. (Evaluation sets are stricter:
`contamination`.) Candidates come from MinHash LSH over 3-word shingles (datasketch) and are measured exactly
(rapidfuzz): LSH can miss a pair, never invent one. A row is compared with kept rows only: a chain a ~ b ~ c drops b,
and c only if it is close to a.

Words: Unicode NFKC, case folded, mark-up and punctuation gone, `1,000` and `1000` the same, every Chinese or Japanese
character one. Masked: every number, in digits or in English words, is `#`, so that the same problem with other numbers
is the same sequence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    "half third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh eighth eighths ninth tenth "
    "tenths "
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


_SHINGLE: Final = 3  # words
_PERMUTATIONS: Final = 128
_WORDS_READ: Final = 20_000  # of one text, for the signature and the comparison


@dataclass(frozen=True)
class Duplicate:
    """`row` repeats the kept row `of`; `similarity` in [0, 1], 1.0 for the same words."""

    row: int
    of: int
    similarity: float


@dataclass(frozen=True)
class Deduplicated:
    """`keep[i]` says whether row i stays; `pairs` holds one entry for every row that goes."""

    keep: list[bool]
    pairs: list[Duplicate]


def deduplicate(texts: Sequence[str], *, similarity: float = 0.85) -> Deduplicated:
    """Which texts to keep so that no two kept ones are duplicates.

    Args: similarity: least word similarity of a near duplicate, in [0.6, 1]; 1.0 drops exact duplicates only.
    Raises: ValueError for a similarity out of range or a text that is no string.
    """
    if not 0.6 <= similarity <= 1:
        raise ValueError(f"similarity={similarity} is not in [0.6, 1]; below 0.6 the candidate search misses pairs")
    rows = [_words(text) for text in texts]
    first: dict[object, int] = {}
    pairs: list[Duplicate] = []
    for row, (text, words) in enumerate(zip(texts, rows, strict=True)):
        key: object = tuple(words) if words else text.strip()  # a text of symbols only is itself its key
        if key in first:
            pairs.append(Duplicate(row, first[key], 1.0))
        else:
            first[key] = row
    if similarity < 1:
        near = {pair.row: pair for pair in _near(rows, sorted(first.values()), similarity)}
        pairs = [*near.values(), *(_to_kept_row(pair, near) for pair in pairs)]
    gone = {pair.row for pair in pairs}
    return Deduplicated([row not in gone for row in range(len(rows))], sorted(pairs, key=lambda pair: pair.row))


def _near(rows: list[list[str]], distinct: list[int], similarity: float) -> list[Duplicate]:
    from datasketch import MinHash, MinHashLSH
    from rapidfuzz.distance import Indel

    lsh = MinHashLSH(threshold=_candidate_threshold(similarity), num_perm=_PERMUTATIONS, weights=(0.2, 0.8))
    template = MinHash(num_perm=_PERMUTATIONS, seed=1)
    pairs: list[Duplicate] = []
    for row in distinct:
        words = rows[row][:_WORDS_READ]
        if not words:
            continue
        signature = template.copy()
        signature.update_batch([" ".join(shingle).encode() for shingle in _shingles(words)])
        best = Duplicate(row, -1, 0.0)
        for candidate in sorted(lsh.query(signature)):
            score = Indel.normalized_similarity(words, rows[candidate][:_WORDS_READ], score_cutoff=similarity)
            if score > best.similarity:
                best = Duplicate(row, candidate, float(score))
        if best.of >= 0:
            pairs.append(best)
        else:
            lsh.insert(row, signature)
    return pairs


def _candidate_threshold(similarity: float) -> float:
    """Shingle Jaccard of a pair that is just similar enough: one changed word of k breaks up to three shingles.

    With a share d = 1 − similarity of the words changed, about (1 − 3d) of the shingles survive on each side and the
    Jaccard similarity is (1 − 3d)/(1 + 3d); half of it leaves room for clustered and scattered changes.
    """
    survives = max(0.2, 1 - _SHINGLE * (1 - similarity))
    return max(0.1, 0.7 * survives / (2 - survives))


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    if len(words) < _SHINGLE:
        return {tuple(words)}
    return set(zip(*(words[start:] for start in range(_SHINGLE)), strict=False))


def _to_kept_row(copy: Duplicate, near: Mapping[int, Duplicate]) -> Duplicate:
    """An exact copy of a row that itself went repeats the row that stays."""
    return replace(near[copy.of], row=copy.row) if copy.of in near else copy


def _words(text: str) -> list[str]:
    if not isinstance(text, str):
        raise ValueError(f"deduplicate compares str; got {type(text).__name__}")
    return words_of(text)
