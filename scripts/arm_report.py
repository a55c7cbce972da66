"""Table and figure of arms that were trained from one start (records: ``arm_runs``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_runs import COLOURS, at_tokens, pyplot_if_there, smoothness, spread

Found = Mapping[str, list[dict[str, Any]]]
"""Arm → its records, one a seed."""


def table(found: Found) -> str:
    """One line an arm; mean ± 95% interval over seeds (Student's t), and the seeds."""
    curves = {arm: [run["points"] for run in runs] for arm, runs in found.items()}
    totals = [max(p[-1]["tokens"] for p in runs) for runs in curves.values()]
    shared = min((total for total in totals if total), default=math.nan)  # no seed of the thriftiest arm has more
    heads = ("held-out accuracy at the end", f"after {shared / 1e3:,.0f} k generated tokens", "mean over the steps")
    heads += (
        "generated tokens, k",
        "variance of differences, points²",
        "of the second half",
        "seconds of training",
        "memory above the libraries, MiB",
    )
    lines = [f"| arm | seeds | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    lines.append(
        f"| (start) | – | {spread([runs[0][0]['accuracy'] for runs in list(curves.values())[:1]])} |"
        + " – |" * (len(heads) - 1)
    )
    for arm, runs in curves.items():
        figures = [
            spread([p[-1]["accuracy"] for p in runs]),
            spread([at_tokens(p, shared) for p in runs]),
            spread([fmean(one["accuracy"] for one in p[1:] or p) for p in runs]),
            f"{fmean(p[-1]['tokens'] for p in runs) / 1e3:,.0f}",
            f"{fmean(smoothness(p) for p in runs):.1f}",
            f"{fmean(smoothness(p[len(p) // 2 :]) for p in runs):.1f}",
            f"{fmean(p[-1]['seconds'] for p in runs):.0f}",
            f"{fmean(run['memory_mib'] for run in found[arm]):.0f}",
        ]
        lines.append(f"| {arm} | {len(runs)} | {' | '.join(figures)} |")
    return "\n".join(lines)


def draw(found: Found, path: Path) -> None:
    """Held-out accuracy over steps and over generated tokens: thin lines the seeds, thick their mean."""
    pyplot = pyplot_if_there(path)
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(10.4, 3.6), sharey=True)
    for axis, (over, unit, title) in zip(
        axes, (("step", 1, "optimizer steps"), ("tokens", 1e6, "generated tokens, millions")), strict=True
    ):
        for colour, (arm, runs) in zip(COLOURS, found.items(), strict=False):
            curves = [[(p[over] / unit, p["accuracy"]) for p in run["points"]] for run in runs]
            if over == "tokens" and not runs[0]["points"][-1]["tokens"]:
                last = fmean(curve[-1][1] for curve in curves)
                axis.axhline(last, color=colour, linestyle=":", label=f"{arm} (generates nothing)")
            else:
                _lines(axis, curves, colour, arm, "steps-post" if over == "tokens" else "default")
        axis.set(xlabel=title)
        axis.grid(alpha=0.25)
    axes[0].set(ylabel="held-out accuracy, greedy")
    axes[1].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lines(axis: Any, curves: list[list[tuple[float, float]]], colour: str, arm: str, style: str) -> None:
    """Seeds measured at different places (rounds of unequal length) are averaged place by place, as far as all of them go.

    Over tokens a line is a stair: a method that generates all its tokens first has learned nothing until then.
    """
    for curve in curves:
        axis.plot(*zip(*curve, strict=True), color=colour, alpha=0.35, linewidth=0.8, drawstyle=style)
    at = list(zip(*curves, strict=False))
    mean = [(fmean(x for x, _ in one), fmean(y for _, y in one)) for one in at]
    axis.plot(*zip(*mean, strict=True), color=colour, linewidth=2, label=arm, drawstyle=style)
