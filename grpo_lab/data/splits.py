"""Which split a made problem belongs to: its own content says so, whatever the seeds and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from grpo_lab.data.word_problem_stories import SPLITS
from grpo_lab.nearest import one_of

_OF_TENTH = ("test",) * 2 + ("cold_start",) * 3 + ("train",) * 5


def split_of(content: str) -> str:
    """``train`` (half of all content), ``cold_start`` (three tenths) or ``test``, by the hash of ``content``."""
    digest = hashlib.sha256(content.encode()).digest()
    return _OF_TENTH[int.from_bytes(digest[:8], "big") % len(_OF_TENTH)]


def checked_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"`split` is {split!r}{one_of(split, SPLITS)}")
    return split


def checked_range(name: str, pair: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """``(fewest, most)`` with ``low <= fewest <= most <= high``."""
    if len(pair) != 2 or not low <= pair[0] <= pair[1] <= high:
        raise ValueError(f"{name} is {pair!r}; a pair (fewest, most) with {low} <= fewest <= most <= {high} is needed")
    return pair[0], pair[1]
