"""GSM8K test questions planted into the 7,473 training rows: verbatim, with other numbers, lightly rephrased."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lab.curation import contaminated, deduplicate, find_contamination

NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NAMES = "Liam|Olivia|Noah|Emma|Ava|Mateo|Sofia|Aisha|Kenji|Priya|Chen|Fatima|Lars|Ingrid|Pavel".split("|")  # noqa: SIM905
SENTENCE_STARTS = (
    "the a an if how what when she he they it in on at each there his her for after every one two three four five six "
    "seven eight nine ten half some all this that to and but then of with out today yesterday tomorrow last next "
    "during "
    "by monday tuesday wednesday thursday friday saturday sunday january february march april may june july august "
    "september october november december mr mrs ms dr i their from as its while since calculate find"
)
NOT_A_NAME = frozenset(SENTENCE_STARTS.split())
SYNONYMS = {
    "How many": "What number of", "how many": "what number of", "How much": "What amount of", "altogether": "in total",
    "bought": "purchased", "buys": "purchases", "each": "apiece", "every day": "each day", "kids": "children",
    "has": "owns", "gets": "receives", "gives": "hands", "makes": "produces", "needs": "requires", "left": "remaining",
    "wants": "would like", "twice as many": "two times as many", "half of": "50% of", "per": "for each",
    "costs": "is priced at", "spends": "uses",
}  # fmt: skip


def other_numbers(text: str, rng: random.Random) -> str:
    def new(match: re.Match[str]) -> str:
        return f"{rng.uniform(1, 50):.2f}" if "." in match[0] else str(rng.randint(2, 99))

    text = re.sub(r"\d+(?:\.\d+)?", new, text)
    return re.sub(rf"\b(?:{'|'.join(NUMBERS)})\b", lambda match: rng.choice(NUMBERS), text)


def other_names(text: str, rng: random.Random) -> str:
    chosen: dict[str, str] = {}

    def new(match: re.Match[str]) -> str:
        word = match[0]
        return word if word.lower() in NOT_A_NAME else chosen.setdefault(word, rng.choice(NAMES))

    return re.sub(r"\b[A-Z][a-z]+\b", new, text)


def synonyms(text: str, rng: random.Random) -> str:
    for word, other in SYNONYMS.items():
        text = re.sub(rf"\b{word}\b", other, text)
    return text


def rephrased(text: str, rng: random.Random) -> str:
    """Names, synonyms and a request in front, all at once."""
    request = rng.choice(["", "Solve this problem. ", "Here is a question: "])
    return request + other_names(synonyms(text, rng), rng)


def question_first(text: str, rng: random.Random) -> str:
    sentences = re.split(r"(?<=[.?!])\s+", text.strip())
    return " ".join([sentences[-1], *sentences[:-1]])


@pytest.fixture(scope="module")
def questions(grpo_lab_data: Path) -> dict[str, list[str]]:
    folder = grpo_lab_data / "gsm8k"
    return {
        split: [json.loads(line)["question"] for line in (folder / f"{split}.jsonl").read_text("utf-8").splitlines()]
        for split in ("train", "test")
    }


@pytest.mark.slow
def test_planted_into_the_training_set(questions: dict[str, list[str]]) -> None:
    rng = random.Random(0)
    train, test = questions["train"], questions["test"]
    kinds = (lambda text, rng: text, other_numbers)
    rows = [(text, None) for text in train] + [
        (kind(text, rng), place) for place, kind in enumerate(kinds) for text in test
    ]
    rng.shuffle(rows)
    flags = contaminated([text for text, _ in rows], test)
    share = {
        kind: sum(flag for flag, (_, of) in zip(flags, rows) if of == kind) / sum(of == kind for _, of in rows)
        for kind in (None, 0, 1)
    }
    assert share[0] == 1
    assert share[1] >= 0.98  # 1.000
    assert share[None] < 0.005  # 13 of 7,473 = 0.17%: docs/choosing_the_data.md says what they are


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "at_least"),  # what was measured stands behind; a share to be stated, not a promise
    [
        (other_names, 0.98),  # 0.995
        (synonyms, 0.98),  # 0.995
        (rephrased, 0.88),  # 0.93
        (lambda text, rng: other_numbers(rephrased(text, rng), rng), 0.88),  # 0.93
        (question_first, 0.95),  # 0.986
    ],
    ids=["other names", "synonyms", "rephrased", "rephrased with other numbers", "question first"],
)
def test_rephrased(
    questions: dict[str, list[str]], plant: Callable[[str, random.Random], str], at_least: float
) -> None:
    rng = random.Random(0)
    test = questions["test"]
    found = find_contamination([plant(text, rng) for text in test], test)
    assert sum(result is not None for result in found) / len(test) >= at_least
    right_item = sum(result is not None and result.item == item for item, result in enumerate(found))
    assert right_item / sum(result is not None for result in found) > 0.99


@pytest.mark.slow
def test_near_duplicates_of_the_training_set(questions: dict[str, list[str]]) -> None:
    result = deduplicate(questions["train"] + questions["train"][:100])
    assert result.keep[7473:] == [False] * 100
    assert result.keep[:7473].count(False) == 8  # an exhaustive search finds 8 as well
