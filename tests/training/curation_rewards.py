"""A reward for curation tests: right or wrong by a digest, so that random models have pass rates of all sizes."""

from __future__ import annotations

import itertools
import os
import time
import zlib
from typing import Any

_call = itertools.count(1)


def by_digest(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """About (solution mod 11) / 10 of a problem's completions are right. A process with ``HOLD_AT_CALL`` comes to that
    call, and no further."""
    if os.environ.get("HOLD_AT_CALL") == str(next(_call)):
        time.sleep(3600)
    return [
        float(zlib.crc32(repr(completion).encode()) % 10 < int(gold) % 11)
        for completion, gold in zip(completions, solution, strict=True)
    ]


def brief(completions: list[Any], **_: Any) -> list[float]:
    """1 where a completion has at most 16 characters: a random model is brief at times, and supervised training on what
    was brief, each with its end behind it, makes it so.
    """
    return [float(len(one[-1]["content"]) <= 16) for one in completions]


def by_tokens(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for an even number of tokens, which the text does not say."""
    assert len(completion_ids) == len(completions)
    return [float(len(ids) % 2 == 0) for ids in completion_ids]


by_digest.measures_correctness = True  # type: ignore[attr-defined]
