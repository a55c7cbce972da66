"""Duplicates inside one set, against an exhaustive search with the textbook table."""

from __future__ import annotations

import numpy
import pytest

from grpo_lab.curation import deduplicate
from grpo_lab.curation.duplicates import words_of


def indel(a: list[str], b: list[str]) -> float:
    """2·LCS/(a + b) by the textbook table."""
    row = [0] * (len(b) + 1)
    for word in a:
        previous = row
        row = [0]
        for column, other in enumerate(b):
            row.append(previous[column] + 1 if word == other else max(row[-1], previous[column + 1]))
    return 2 * row[-1] / (len(a) + len(b))


def test_exact_duplicates_keep_the_first() -> None:
    result = deduplicate(["One cat?", "a dog", "one  CAT", "a dog.", "", " ", "😀", "😀", "?"], similarity=1.0)
    assert result.keep == [True, True, False, False, True, False, True, False, True]
    assert [(pair.row, pair.of) for pair in result.pairs] == [(2, 0), (3, 1), (5, 4), (7, 6)]


def test_near_duplicates_agree_with_an_exhaustive_search() -> None:
    rng = numpy.random.default_rng(1)
    vocabulary = [f"{a}{b}{c}" for a in "bcdfgklm" for b in "aeiou" for c in ("n", "r")]
    texts: list[str] = []
    for _ in range(25):
        words = list(rng.choice(vocabulary, size=int(rng.integers(15, 40))))
        texts.append(" ".join(words))
        for _ in range(2):
            copy = list(words)
            for place in rng.choice(len(copy), size=max(1, int(len(copy) * rng.uniform(0, 0.25))), replace=False):
                copy[place] = str(rng.choice(vocabulary))
            texts.append(" ".join(copy))
    kept: list[int] = []
    for row, text in enumerate(texts):
        if all(indel(words_of(text), words_of(texts[k])) < 0.85 for k in kept):
            kept.append(row)
    result = deduplicate(texts)
    # LSH may miss a pair near the threshold; of the true ones it missed none when this was written
    missed = [row for row, keep in enumerate(result.keep) if keep and row not in kept]
    assert len(missed) <= 2
    assert 25 <= sum(result.keep) < 55
    for pair in result.pairs:
        assert result.keep[pair.of]
        assert not result.keep[pair.row]
        assert pair.similarity == pytest.approx(indel(words_of(texts[pair.row]), words_of(texts[pair.of])))
        assert pair.similarity >= 0.85


@pytest.mark.parametrize("similarity", [0.5, 1.1])
def test_a_similarity_out_of_range(similarity: float) -> None:
    with pytest.raises(ValueError, match="similarity"):
        deduplicate(["a"], similarity=similarity)


def test_hostile_text() -> None:
    result = deduplicate(["a " * 50_000, "a " * 49_999, "", "\ud800", "\\frac{" * 20_000, "x" * 100_000])
    assert result.keep == [True, False, True, True, True, True]


LONG = " ".join(f"w{number}" for number in range(20_000))
FIRST = "Ann had fifty euros and bought two tapes at nine euros each and a headset at twenty five euros. What is left?"


@pytest.mark.parametrize(("first", "near"), [(FIRST, FIRST.replace("Ann", "Eva")), (f"{LONG} one", f"{LONG} two")])
def test_a_copy_of_a_near_duplicate_points_at_the_row_that_stays(first: str, near: str) -> None:
    """Also where the two differ only behind the words that are read: there the similarity is 1."""
    result = deduplicate([first, near, near])
    assert result.keep == [True, False, False]
    assert [(pair.row, pair.of) for pair in result.pairs] == [(1, 0), (2, 0)]
    assert result.pairs[1].similarity == result.pairs[0].similarity
