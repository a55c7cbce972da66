"""Padding by itself: the share of a solution's lines that only say the line before them again."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any


def doubled_right(result: Any, _: Any) -> float:
    return doubled([one.completion for one in result.sampled if one.correct])


def doubled_wrong(result: Any, _: Any) -> float:
    return doubled([one.completion for one in result.sampled if one.correct is False])


def doubled(completions: list[str]) -> float:
    """Of all lines of all completions; NaN where there are none."""
    lines = [[line.strip() for line in one.splitlines() if line.strip()] for one in completions]
    again = sum(line == before for of_one in lines for before, line in pairwise(of_one))
    return again / total if (total := sum(map(len, lines))) else math.nan
