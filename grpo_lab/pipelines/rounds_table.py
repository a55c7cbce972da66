"""One line for each round, out of what its parts found, and the columns in which it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.evaluation.run_page import ACCURACY

Line = dict[str, Any]


def line_of(number: int, facts: Mapping[str, Mapping[str, Any]], before: Sequence[Line]) -> Line:
    """The line of round ``number`` (0: the start).

    ``kept_share`` = own rows or pairs / samples; ``ways`` = right answers that differ, a problem solved; ``tokens``
    generated and optimizer ``steps`` also as totals over the rounds so far (a cold start's steps are not among them).
    """
    sample, select, train, found = (facts.get(name, {}) for name in ("sample", "select", "train", "evaluate"))
    accuracy = found.get("accuracy") or {}
    own = select.get("kept", 0) - select.get("gold", 0)
    total = before[-1] if before else {}
    steps = train.get("steps", 0) if number else 0
    line = {
        "round": number,
        "questions": sample.get("questions"),
        "samples": sample.get("samples"),
        "right_share": sample.get("right_share"),
        "solved": select.get("solved"),
        "ways": _ratio(select.get("ways"), select.get("solved")),
        "kept_share": _ratio(own, sample.get("samples")),
        "rows": select.get("rows"),
        "gold": select.get("gold"),
        "tokens": sample.get("tokens", 0),
        "tokens_total": total.get("tokens_total", 0) + sample.get("tokens", 0),
        "sample_length": sample.get("mean_length"),
        "steps": steps,
        "steps_total": total.get("steps_total", 0) + steps,
        "loss": train.get("loss") if number else None,
        "accuracy": accuracy.get("value"),
        "accuracy_low": accuracy.get("low"),
        "accuracy_high": accuracy.get("high"),
        "length": found.get("mean_length"),
        "length_right": found.get("mean_length_correct"),
    }
    return line | {name: train[name] for name in ("weight_first", "weight_last") if name in train}


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


COLUMNS = [
    ("round", "{round}"),
    ("right", "{right_share:.1%}"),
    ("kept", "{kept_share:.1%}"),
    ("ways", "{ways:.2f}"),
    ("rows", "{rows:,}"),
    ("tokens", "{tokens_total:,}"),
    ("held-out accuracy", ACCURACY),
    ("length", "{length:.1f}"),
]
"""What fits on a terminal; the page and `rounds.jsonl` have the rest. ``tokens``: generated so far."""
