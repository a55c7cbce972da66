"""Every rule of the contamination filter on a hand-made pair, its limits for short texts, and hostile text."""

from __future__ import annotations

import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Indel

from grpo_lab.curation import contaminated, find_contamination
from grpo_lab.curation.duplicates import masked, words_of

ITEM = (
    "Maria has 48 clips and sells half of them to her friends in April for $1,250.50 each. In May she sells three more "
    "boxes to a shop in the next town. How many clips did Maria sell altogether in April and May?"
)
OTHER = "A bakery bakes 200 loaves a day and gives away what is left in the evening. How many loaves does it give away?"


def reason(text: str, item: str = ITEM) -> str | None:
    found = find_contamination([text], [OTHER, item])[0]
    return None if found is None else found.reason


def test_words_are_normalised_and_numbers_masked() -> None:
    assert words_of("Don’t pay $1,000.5!") == ["don't", "pay", "1000.5"]
    assert words_of("ＡＢＣ 是什么") == ["abc", "是", "什", "么"]
    assert words_of("\\dfrac{1}{2}") == words_of("\\frac 1 2")
    found = masked(words_of("twenty five dogs, 3 1/2 cats and half a cow"))
    assert found == ["#", "dogs", "#", "/", "#", "cats", "and", "#", "a", "cow"]


RUN = " ".join(words_of(ITEM)[-13:])
CUPS = "Ann has 3 red and five blue cups. She drops two of them. How many cups has she?"
THINGS = "Ann has 4 cups and Bob has 9 plates. How many things do they have together now?"  # 17 words


@pytest.mark.parametrize(
    ("text", "item", "expected"),
    [
        (ITEM.upper().replace(" ", "\n") + "!!", ITEM, "exact"),  # whatever the layout
        (f"Before all that, something quite different happened to somebody: {RUN}", ITEM, "ngram"),
        (f"Before all that, something quite different happened to somebody: {RUN.split(' ', 1)[1]}", ITEM, None),
        (CUPS.replace("3", "17").replace("five", "12").replace("two", "one"), CUPS, "other_numbers"),
        # a short item counts where it is most of the text
        ("Please, factor the polynomial x cubed minus one.", "Factor the polynomial x cubed minus one.", "ngram"),
        # below twenty words near takes more: 15 of 17 words stay, 0.88; 14 of them, 0.82
        (THINGS.replace("Ann", "Eve").replace("plates", "forks"), THINGS, "near"),
        (THINGS.replace("Ann", "Eve").replace("plates", "forks").replace("things", "pieces"), THINGS, None),
    ],
)
def test_each_rule_by_hand(text: str, item: str, expected: str | None) -> None:
    assert reason(text, item) == expected


def test_other_numbers_inside_a_longer_text() -> None:
    changed = (
        ITEM.replace("48", "7").replace("1,250.50", "3").replace("three", "nine").replace("How many clips", "What")
    )
    found = find_contamination(["Here is something to think about for a while. " * 5 + changed], [OTHER, ITEM])[0]
    assert found is not None
    assert found.item == 1
    assert found.reason in {"ngram", "masked_ngram"}


def test_near_duplicate_with_the_similarity_of_the_formula() -> None:
    item = (
        "Ann has 4 cups and Bob has 9 plates and they put all of them into one box and carry it home today. How many?"
    )
    text = (
        "Eve has 4 cups and Jim has 9 plates and they put all of these into one crate and carry it back today. "
        "How many?"
    )
    # 5 of the 25 words differ: LCS = 20, similarity 2·20/(25 + 25) = 0.8
    found = find_contamination([text], [item])[0]
    assert found is not None
    assert found.reason == "near"
    assert found.similarity == pytest.approx(0.8)
    assert contaminated([text], [item], similarity=0.85) == [False]


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("What is 3 + 4?", "What is 5 + 9?"),  # a template of everybody
        ("Factor $x^2 - 9$.", "Factor $x^2 - 25$."),
        (
            "Find the value of x in this long story about a farmer, his cow, a hen, two pigs and one duck.",
            "Find the value of x",
        ),
        ("Tom has 3 cups. How many cups has Tom?", "Ann has 3 pens. How many pens has Ann?"),
    ],
)
def test_short_texts_are_not_contaminated_by_chance(text: str, item: str) -> None:
    assert contaminated([text], [item]) == [False]
    assert contaminated([item], [item]) == [True]


def test_a_short_item_that_is_nearly_close_hides_no_longer_one_that_is() -> None:
    longer = THINGS.replace("now?", "now in their big old kitchen at home?")
    text = longer.replace("Ann", "Eve").replace("Bob", "Jim").replace("plates", "forks").replace("things", "pieces")
    found = find_contamination([text], [THINGS, longer])[0]
    assert found is not None
    assert found.item == 1


def test_texts_without_words() -> None:
    assert contaminated(["", "  ", "!?", "😀", "plain"], ["😀", "", "?"]) == [False, False, False, True, False]
    assert contaminated(["a", ""], []) == [False, False]
    assert contaminated([], ["a"]) == []


def test_the_near_search_is_the_exhaustive_maximum() -> None:
    rng = numpy.random.default_rng(0)
    vocabulary = [f"{a}{b}" for a in "bcdfgklm" for b in ("an", "or", "it", "ul")]
    make = lambda: " ".join(rng.choice(vocabulary, size=rng.integers(20, 30)))  # noqa: E731
    items = [make() for _ in range(40)]
    texts = []
    for item in items:
        words = item.split()
        for place in rng.choice(len(words), size=int(rng.integers(3, 11)), replace=False):
            words[place] = str(rng.choice(vocabulary))
        texts.append(" ".join(words))
    best = [max(Indel.normalized_similarity(t.split(), i.split()) for i in items) for t in texts]
    found = find_contamination(texts, items)
    near = [(f, b) for f, b in zip(found, best) if f is None or f.reason == "near"]
    assert len(near) > 20
    for result, expected in near:
        assert (result is not None) == (expected >= 0.7 - 1e-6)
        if result is not None:
            assert result.similarity == pytest.approx(expected, abs=1e-6)


def test_blocks_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [OTHER, ITEM, "nothing of the kind", "", ITEM.replace("48", "3")] * 3
    whole = find_contamination(texts, [ITEM, OTHER])
    monkeypatch.setattr("grpo_lab.curation.duplicates._CELLS_AT_ONCE", 4)  # two texts a block
    assert find_contamination(texts, [ITEM, OTHER]) == whole


@pytest.mark.not_fast
@given(st.lists(st.text(max_size=60), max_size=8), st.lists(st.text(max_size=60), max_size=8))
@settings(max_examples=100, deadline=None)
def test_any_text_goes_in_and_planted_items_are_found(texts: list[str], items: list[str]) -> None:
    flags = contaminated([*texts, *items], items)
    assert len(flags) == len(texts) + len(items)
    assert all(flag or not item.strip() for item, flag in zip(items, flags[len(texts) :]))


def test_hostile_text_takes_no_time() -> None:
    hostile = ["a" * 100_000, "1 " * 50_000, "\\frac{" * 15_000, "how many " * 12_000, "1,000," * 15_000, "\ud800" * 9]
    started = time.process_time()
    assert contaminated(hostile, [ITEM, OTHER] * 50) == [False] * len(hostile)
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("texts", "against", "options", "says"),
    [
        ("one text", ["a"], {}, "list of texts"),
        (["a"], "one text", {}, "against is one str"),
        (["a"], ["b"], {"ngram": 3}, "ngram=3"),
        (["a"], ["b"], {"similarity": 0.2}, "similarity=0.2"),
        ([None], ["b"], {}, "NoneType"),
    ],
)
def test_bad_input_is_named(texts: object, against: object, options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        contaminated(texts, against, **options)  # type: ignore[arg-type]
