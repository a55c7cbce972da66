"""Endless, seeded rows of numbers to be sorted: the lab's task in which a reward is gamed, and seen to be.

    prompt        4 2 4 4
    solution      2 4 4 4
    numbers       [4, 2, 4, 4]          (what ``grpo_lab.rewards.SortingReward`` reads)

**Splits are disjoint by construction**: the hash of the sorted numbers decides. **A cold start on the form alone**:
``worked_solution`` is as many random numbers; whoever sorts after it has learnt that from a reward.

Source: the sorting chapter of CS336 lecture 17 (L = 4 of V = 10).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_lab.data.made import checked_split, different, take
from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import to_dataset

if TYPE_CHECKING:
    from datasets import Dataset

#: tenths of all sorted answers
_SPLIT_OF_TENTH = ("test",) * 2 + ("cold_start",) * 2 + ("train",) * 6
SORTING_SPLITS = tuple(dict.fromkeys(_SPLIT_OF_TENTH))


def sorting(
    n: int,
    seed: int = 0,
    split: str = "train",
    length: int = 4,
    vocabulary: int = 10,
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """``n`` different prompts, each of them as likely as any other: columns ``prompt, template, question, solution,
    worked_solution, numbers``.

    ``seed``, ``split``, ``template`` and ``system_prompt`` are those of ``word_problems``.

    Args:
        length: L, numbers of a prompt.
        vocabulary: V; numbers are 0 … V − 1, drawn with replacement.

    Raises:
        ValueError: a setting out of its range, or fewer than ``n`` different prompts under these settings.
    """
    checked_split(split, SORTING_SPLITS)
    for name, value, least in (("length", length, 1), ("vocabulary", vocabulary, 2)):
        if value < least:
            raise ValueError(f"{name} is {value}; at least {least} is needed")
    form = find_template(template, system_prompt)
    rng = random.Random(f"{seed}/{split}")

    def draw() -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = tuple(rng.randrange(vocabulary) for _ in range(length))
        return numbers, numbers

    limits = {"split": split, "length": length, "vocabulary": vocabulary}
    found = take(different(draw, split, _split_of), n, "prompts", "Raise length or vocabulary", **limits)
    writer = random.Random(f"{seed}/{split}/writer")
    return to_dataset((_row(numbers, [writer.randrange(vocabulary) for _ in numbers]) for numbers in found), form)


def _split_of(numbers: tuple[int, ...]) -> str:
    digest = hashlib.sha256(_text(sorted(numbers)).encode()).digest()
    return _SPLIT_OF_TENTH[int.from_bytes(digest[:4], "big") % 10]


def _row(numbers: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
    return {
        "question": _text(numbers),
        "solution": _text(sorted(numbers)),
        "worked_solution": _text(answer),
        "numbers": list(numbers),
    }


def _text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
