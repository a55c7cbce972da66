"""What a mathematical comparison can come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The six ends of a comparison. Only `EQUAL` earns a reward; only `UNPARSEABLE_GOLD` leaves a row unscored."""

    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    UNPARSEABLE_GOLD = "unparseable_gold"
    UNPARSEABLE_ANSWER = "unparseable_answer"
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True)
class MathVerdict:
    """`verdict`, and in words why (`reason`: which rule decided, or what went wrong)."""

    verdict: Verdict
    reason: str

    @property
    def equal(self) -> bool:
        return self.verdict is Verdict.EQUAL
