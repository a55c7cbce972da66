"""SortingReward: how well a completion sorts the prompt's numbers. A lab's reward: two of its kinds can be gamed, and
show it.

    distance                       Σ_i 1[o_i = sorted(q)_i]                                           0 … L
    inclusion_ordering             Σ_{x ∈ q} 1[x ∈ o] + Σ_i 1[o_i ≤ o_{i+1}]                           0 … 2L − 1
    inclusion_ordering_multiset    Σ_x min(count_x(q), count_x(o)) + Σ_i 1[o_i ≤ o_{i+1}]              0 … 2L − 1
    exact                          1[o = sorted(q)]                                                  0 or 1

Source: CS336 lecture 17. Its code has ``inclusion_ordering``, its formula counts with multiplicity: for [4, 2, 4, 4] →
[0, 2, 4, 6] 7 and 5. A uniformly random answer (L = 4 of V = 10) earns 3.03 and 2.86.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from grpo_lab.rewards.completion import RowReward

_INTEGER = re.compile(r"-?[0-9]+")
#: Python reads no longer one; beyond it a number is in order and equals none
MOST_DIGITS = 4000


def _number(digits: str) -> float:
    if len(digits) <= MOST_DIGITS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


def _in_order(answer: Sequence[float]) -> int:
    return sum(a <= b for a, b in pairwise(answer))


def _distance(numbers: list[int], answer: Sequence[float]) -> float:
    return float(sum(a == b for a, b in zip(sorted(numbers), answer, strict=True)))


def _inclusion(numbers: list[int], answer: Sequence[float]) -> float:
    return float(sum(x in answer for x in numbers) + _in_order(answer))


def _multiset(numbers: list[int], answer: Sequence[float]) -> float:
    wanted: Counter[float] = Counter(numbers)
    return float(sum((wanted & Counter(answer)).values()) + _in_order(answer))


def _exact(numbers: list[int], answer: Sequence[float]) -> float:
    return float(list(answer) == sorted(numbers))


KINDS: dict[str, Callable[[list[int], Sequence[float]], float]] = {
    "distance": _distance,
    "inclusion_ordering": _inclusion,
    "inclusion_ordering_multiset": _multiset,
    "exact": _exact,
}


class SortingReward(RowReward):
    """Reads the integers of a completion in order; fewer or more than the prompt's L earn 0, and a row without numbers
    None.

    Args:
        kind: ``distance``, ``inclusion_ordering``, ``inclusion_ordering_multiset`` or ``exact`` (the formulas above).
    """

    columns = ("numbers",)

    def __init__(self, kind: str = "exact") -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; it must be one of {list(KINDS)}")
        self.kind = kind
        self.__name__ = f"sorting_{kind}_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"SortingReward({self.kind!r})"

    def score(self, text: str, *row: Any) -> float | None:
        wanted = _integers(row[0])
        if not wanted:
            return None
        found = _INTEGER.findall(text)
        if len(found) != len(wanted):
            return 0.0
        return KINDS[self.kind](wanted, [_number(one) for one in found])


def _integers(row: Any) -> list[int]:
    if row is None:
        return []
    try:
        if not isinstance(row, str | bytes | dict):
            return [int(one) for one in row]
    except (TypeError, ValueError):
        pass
    kind = "text" if isinstance(row, str) else type(row).__name__
    raise ValueError(f"`numbers` holds the {kind} {row!r:.200}; it must be a list of integers")
