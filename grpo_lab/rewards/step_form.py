"""The form of a step reward's answer, checked: one list a completion, ends within it and ascending, scores finite or ``None``."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from grpo_lab.verifiers.correct import as_number

StepScores = list[tuple[int, float | None]]


def checked_steps(
    scored: Any,
    completion_ids: Sequence[Sequence[int]],
    name: str,
    nan_rows: set[int] | None = None,
    keep_infinite: bool = False,
) -> list[StepScores]:
    """One list a completion, ends within it and ascending, scores finite or ``None`` (also for a NaN).

    ``nan_rows`` gets the place of every completion with a step that was scored NaN; ``keep_infinite``: an infinite score is handed on.
    """
    rows = _lists(scored, len(completion_ids), name)
    found: list[StepScores] = []
    nan_rows = set() if nan_rows is None else nan_rows
    for place, (row, ids) in enumerate(zip(rows, completion_ids, strict=True)):
        steps: StepScores = []
        for step in row:
            end, score = _pair(step, place, name)
            last = steps[-1][0] if steps else -1
            if not isinstance(end, int) or isinstance(end, bool) or not last < end < len(ids):
                raise ValueError(
                    f"step reward {name!r} ends a step of completion {place} at token {end!r}; ends are whole numbers that "
                    f"ascend within the completion's {len(ids)} tokens (0 = first), and the one before is {last}"
                )
            if score is not None and math.isinf(score) and not keep_infinite:
                raise ValueError(
                    f"step reward {name!r} gave {score} to a step of completion {place}; allowed are finite numbers, or None"
                )
            if score is not None and math.isnan(score):
                nan_rows.add(place)
                score = None
            steps.append((end, score))
        found.append(steps)
    return found


def _lists(scored: Any, count: int, name: str) -> list[list[Any]]:
    """A list of lists, one a completion."""
    form = f"a step reward returns [[(end_token, score), …], …], one list for each of the {count} completions"
    if scored is None or isinstance(scored, str | Mapping) or not hasattr(scored, "__iter__"):
        raise ValueError(f"step reward {name!r} returned {scored!r}; {form}")
    rows = []
    for place, row in enumerate(scored):
        if (
            row is None
            or isinstance(row, str | Mapping)
            or not hasattr(row, "__iter__")
            or getattr(row, "ndim", 1) == 0
        ):
            raise ValueError(
                f"step reward {name!r} returned {row!r} for completion {place}; {form} (an empty one where no step is scored)"
            )
        rows.append(list(row))
    if len(rows) != count:
        raise ValueError(f"step reward {name!r} returned {len(rows)} lists for {count} completions")
    return rows


def _pair(step: Any, place: int, name: str) -> tuple[Any, float | None]:
    """``(end_token, score)`` as Python's own numbers (numpy's and torch's are taken, too)."""
    try:
        end, score = step
        value = as_number(score)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"step reward {name!r} gave {step!r} for a step of completion {place}; a step is (end_token, score), the score a finite "
            "number or None"
        ) from error
    if not isinstance(end, bool):
        with suppress(TypeError):  # what is no whole number is named where its place is checked
            end = operator.index(end)
    return end, value


__all__ = ["StepScores", "checked_steps"]
