r"""The gold answer inside a `solution` column: a bare answer, GSM8K's `... #### 18`, or a full solution with `\boxed{}`."""

from __future__ import annotations

import math
from typing import Any

from grpo_lab.rewards.expression import is_expression, stated_expression
from grpo_lab.rewards.extraction import extract_answer
from grpo_lab.rewards.whole_number import number_in_words

_SHORT = 60


def gold_answer(solution: Any) -> str | None:
    """The answer a solution ends with, or None where there is none to be had.

    Whether the answer itself can be compared with anything is the verifier's to say (`kind_of_gold`).
    """
    if isinstance(solution, bool) or solution is None:
        return None
    if isinstance(solution, (int, float)):
        return _number(solution) if isinstance(solution, float) else digits(solution)
    if not isinstance(solution, str) or not solution.strip():
        return None
    text = solution.strip()
    marked = extract_answer(text)
    if marked is not None and not marked.weak:
        return marked.text
    if (len(text) <= _SHORT and "\n" not in text and " " not in text) or is_expression(text.replace("$", "")):
        return stated_expression(text) or text
    return stated_expression(text) or number_in_words(text) or (text if _is_label(text) else None)


def digits(value: int) -> str | None:
    """An integer as text; None where it has more digits than Python writes (no answer of a model's has them either)."""
    try:
        return str(value)
    except ValueError:
        return None


def _number(value: float) -> str | None:
    if not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else repr(value)


def _is_label(text: str) -> bool:
    return (text[:1].isupper() and text[1:2] in ".):") or (text[:1] == "(" and text[2:3] == ")")
