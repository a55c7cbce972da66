"""Exact and near duplicates inside one set: keep the first row of each family.

Exact: the same normalised words (`words.words_of`). Near: Indel similarity of the words, 2·LCS/(a + b), of at least
0.85. Numbers are words like any other here, so a long problem that differs from a kept one in a single number or name
goes, and a problem with most numbers changed stays. (Evaluation sets are stricter, see `contamination`.)

Here both sides are large, so candidates come from MinHash LSH over 3-word shingles (datasketch: the maintained
implementation with banding chosen for a threshold); every candidate is then measured exactly (rapidfuzz), so LSH can
only miss a pair, never invent one. A row is compared with kept rows only: a chain a ~ b ~ c drops b, and c only if
it is close to a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from grpo_lab.curation.words import words_of

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
