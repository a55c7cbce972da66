"""Runs inside a worker process: are these two mathematical expressions equal, in math-verify's judgement?

Both arrive already cut out of their text and in canonical spelling (`verifiers.canonical`), so math-verify's own search
for the answer in prose is not used: each is put between dollars and parsed as one piece of LaTeX.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from grpo_lab.verifiers.exact_numbers import decimals_compared

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own (signal) time limit is off; ours is on


def _parse(expression: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    one_line = expression.replace("\n", " ")
    return list(parse(f"${one_line}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None))


def _verify(gold: list[Any], answer: list[Any], decimals: int) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, float_rounding=decimals, timeout_seconds=None))


@lru_cache(maxsize=256)
def _usable_gold(gold: str) -> list[Any]:
    """The parsed gold, empty unless it is accepted as an answer to itself (1/0, for one, is not)."""
    parsed = _parse(gold)
    return parsed if parsed and _verify(parsed, parsed, decimals_compared(gold)) else []


def compare(job: dict[str, str]) -> dict[str, str]:
    """`{"gold", "answer"}` -> `{"verdict", "reason"}` with the values of `verdict.Verdict`."""
    gold = _usable_gold(job["gold"])
    if not gold:
        return {"verdict": "unparseable_gold", "reason": "math-verify cannot read the gold answer"}
    if job["answer"] == job["gold"]:
        return {"verdict": "equal", "reason": "same spelling"}
    answer = _parse(job["answer"])
    if not answer:
        return {"verdict": "unparseable_answer", "reason": "math-verify cannot read the answer"}
    if _verify(gold, answer, decimals_compared(job["gold"])):
        return {"verdict": "equal", "reason": "math-verify"}
    return {"verdict": "not_equal", "reason": "math-verify"}


# At start-up, where no job's clock is running: import sympy and build the parser's tables (the first parse is ten times
# slower than the next).
compare({"gold": r"\frac{1}{2}", "answer": "(x+0.5)^2"})
