"""A reward for curation tests: right or wrong by a digest, so that random models have pass rates of all sizes."""

from __future__ import annotations

import zlib
from typing import Any


def by_digest(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """About (solution mod 11) / 10 of a problem's completions are right."""
    return [
        float(zlib.crc32(repr(completion).encode()) % 10 < int(gold) % 11)
        for completion, gold in zip(completions, solution, strict=True)
    ]


def early_letter(completions: list[Any], **_: Any) -> list[float]:
    """1 where the first letter or sign of a completion is one of a … l: something that a random model does at times, and that a few
    steps of supervised training teach it, whatever comes after it.
    """
    return [float(one[-1]["content"].lstrip()[:1] in tuple("abcdefghijkl")) for one in completions]
