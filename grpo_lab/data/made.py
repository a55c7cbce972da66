"""What the makers of endless, seeded rows share: a split that follows from the content, and different rows until there
are enough."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from grpo_lab.settings import one_of

T = TypeVar("T")
Mark = TypeVar("Mark", bound=Hashable)
PATIENCE = 20_000
"""Draws in a row without a new row of the split, after which there is none."""
_OF_TENTH = ("test",) * 2 + ("cold_start",) * 3 + ("train",) * 5
SPLITS = tuple(dict.fromkeys(_OF_TENTH))


def split_of(content: str) -> str:
    """``train`` (half of all content), ``cold_start`` (three tenths) or ``test``, by the hash of ``content``."""
    digest = hashlib.sha256(content.encode()).digest()
    return _OF_TENTH[int.from_bytes(digest[:8], "big") % len(_OF_TENTH)]


def different(draw: Callable[[], tuple[Mark, T] | None], split: str, find_split: Callable[[Mark], str]) -> Iterator[T]:
    """The rows of ``split`` that ``draw`` comes upon, none twice; ends when no new one turns up (``PATIENCE``).

    ``draw`` gives a row behind what makes it the same as another one, or None for a dead end.
    """
    seen: set[Mark] = set()
    misses = 0
    while misses < PATIENCE:
        drawn = draw()
        misses += 1
        if drawn is not None and drawn[0] not in seen and find_split(drawn[0]) == split:
            misses = 0
            seen.add(drawn[0])
            yield drawn[1]


def take(rows: Iterator[T], n: int, what: str, advice: str, **settings: Any) -> list[T]:
    """The first ``n``. ValueError where there are fewer under these ``settings``."""
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 is needed")
    found = list(islice(rows, n))
    if len(found) < n:
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise ValueError(f"only {len(found)} different {what} were found for {said}; n={n} asked. {advice}, or lower n")
    return found


def checked_split(split: str, splits: Sequence[str] = SPLITS) -> str:
    if split not in splits:
        raise ValueError(f"`split` is {split!r}{one_of(split, splits)}")
    return split


def checked_range(name: str, pair: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """``(fewest, most)`` with ``low <= fewest <= most <= high``."""
    if len(pair) != 2 or not low <= pair[0] <= pair[1] <= high:
        raise ValueError(f"{name} is {pair!r}; a pair (fewest, most) with {low} <= fewest <= most <= {high} is needed")
    return pair[0], pair[1]
