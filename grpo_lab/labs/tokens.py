"""Arms beside each other at equal generated tokens: who learns most from as much writing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from grpo_lab.labs.experiment import Found, Lines, markdown, spread

GENERATED = "rollout/generated"
"""In ``metrics.jsonl``: tokens that the policy has written until then."""


def until(curve: Sequence[tuple[float, float]], tokens: float) -> float:
    """What was there when ``tokens`` had been generated: the value of the last point with no more; NaN if there is
    none. ``curve``: (tokens, value), in their order."""
    return next((value for at, value in reversed(curve) if at <= tokens), math.nan)


def at_equal_tokens(panels: Mapping[str, Lines]) -> str:
    """A table of each arm's values, as `spread`, where the run that generated least of all had generated all; empty
    where there are no curves. ``panels``: title → arm → curves of (tokens, value), one a seed."""
    runs = [curve for lines in panels.values() for curves in lines.values() for curve in curves if curve]
    if not runs:
        return ""
    shared = min(curve[-1][0] for curve in runs)
    arms = dict.fromkeys(arm for lines in panels.values() for arm in lines)
    rows = [
        [arm, *(spread([until(curve, shared) for curve in lines.get(arm, [])]) for lines in panels.values())]
        for arm in arms
    ]
    return f"After {shared / 1e3:,.1f} k generated tokens:\n\n{markdown(['arm', *panels], rows)}"


def over_tokens(found: Found, curves: Mapping[str, str], width: int = 10) -> dict[str, Lines]:
    """Title → arm → running means of the last ``width`` rows of the log, over the tokens that had been generated, one a
    seed. ``curves``: title → name in the record's ``curves``, pairs of tokens and value. ValueError: an earlier
    release's, which say no tokens."""
    panels: dict[str, Lines] = {}
    for title, name in curves.items():
        logged = {arm: [run["curves"][name] for run in runs if run["curves"][name]] for arm, runs in found.items()}
        panels[title] = {arm: [_smooth(curve, width) for curve in several] for arm, several in logged.items()}
    return panels


def _smooth(curve: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    if not isinstance(curve[0], Sequence):
        raise ValueError(
            "a record's curves have no generated tokens: an earlier release wrote it. Take another --folder"
        )
    values = [value for _, value in curve]
    return [(at, fmean(values[max(0, place - width + 1) : place + 1])) for place, (at, _) in enumerate(curve)]
