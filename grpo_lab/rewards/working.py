r"""``worked_out``: whether a completion writes a calculation down. To be watched beside an accuracy, at weight 0, not to be paid for.

"Ann has 4*6=24 stamps.\n#### 24" -> 1        "#### 24" -> 0        "x = 24" -> 0
"""

from __future__ import annotations

import re
from typing import Any

from grpo_lab.rewards.completion import completion_text

#: characters that are read: an answer that is worked out calculates long before them
MOST_READ = 8_000
_OPERATION = r"\d[^=\n\d]{0,20}(?:[-+*/×÷·⋅−^]|\bx\b|\\times|\\cdot|\\div)[^=\n\d]{0,20}\d|\\[dt]?frac"
_CALCULATION = re.compile(rf"(?:{_OPERATION})[^=\n]{{0,80}}=|=[^=\n]{{0,80}}?(?:{_OPERATION})")


def works_out(text: str) -> bool:
    """Whether ``text`` has an operation on numbers and a sign of equality in one line, right or wrong; ``MOST_READ`` characters are read.

    Words that reason without a calculation are not seen.
    """
    return _CALCULATION.search(text[:MOST_READ]) is not None


def worked_out(completions: list[Any], **_: Any) -> list[float]:
    """1 where a completion writes a calculation down (``works_out``), else 0.

    As a reward of weight 0 it changes nothing, and the run logs ``rewards/worked_out/mean``: the share of completions that
    reason on paper. Paid for, it would teach a model to write calculations, needed or not. (TRL sums what is scorable: a completion
    that every other reward calls unscorable counts as 0 with it.)
    """
    return [float(works_out(completion_text(completion))) for completion in completions]


__all__ = ["worked_out", "works_out"]
