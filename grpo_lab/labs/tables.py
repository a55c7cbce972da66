"""Tables and figures of an experiment's records: means over seeds with their interval, and curves over tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.evaluation.statistics import half_width_over_seeds
from grpo_lab.labs.cells import Found

Lines = Mapping[str, Sequence[Sequence[tuple[float, float]]]]
"""Label → curves of (x, y), one per seed."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#A8558A", "#6B7280", "#C28E0E")
GRID: Mapping[str, Any] = {"alpha": 0.25}
LEGEND: Mapping[str, Any] = {"fontsize": 8, "frameon": False}
"""How every figure of a lab draws its grid and its legend."""


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def spread(values: Sequence[float]) -> str:
    """Format the mean ± half of its 95% interval over seeds (Student's t), and the single values; NaN is left out."""
    values = [value for value in values if not math.isnan(value)]
    if any(abs(value) >= 1000 for value in values):
        form = ",.0f"
    else:
        form = ".3f"
    said = [format(value, form) for value in values]
    if not said:
        return "–"
    if len(said) == 1:
        return said[0]
    return f"{fmean(values):{form}} ± {half_width_over_seeds(values) or 0.0:{form}} ({', '.join(said)})"


def interval(numbers: Sequence[float], form: str = ".3f") -> str:
    """Format the mean of ``numbers``, and half of its 95% interval over seeds if there are two."""
    if not numbers:
        return "–"
    half = half_width_over_seeds(numbers)
    mean = format(fmean(numbers), form)
    if half is None:
        return mean
    return f"{mean} ± {format(half, form.lstrip('+'))}"


def side(differences: Sequence[float]) -> int:
    """Return 1 if the 95% interval of the mean lies above 0, −1 if it lies below, else 0; 0 for fewer than two
    numbers."""
    half = half_width_over_seeds(differences)
    if half is None or abs(fmean(differences)) <= half:
        return 0
    return int(math.copysign(1, fmean(differences)))


def table(found: Found) -> str:
    """Make the Markdown table of an experiment's records: a row for each arm, a column for each number in a record's
    ``after``, formatted by `spread`.

    If records have numbers in ``before``, a first row has those of the start, as the first arm's seeds measured them.
    """
    first = next(iter(found.values()))
    names = list(first[0]["after"])
    rows = [
        [arm, str(len(runs)), *(spread([run["after"].get(name, math.nan) for run in runs]) for name in names)]
        for arm, runs in found.items()
    ]
    if first[0].get("before"):
        starts = [run["before"] for run in first if run.get("before")]
        values = [[start.get(name, math.nan) for start in starts] for name in names]
        rows.insert(0, ["(start)", "–", *map(start_value, values)])
    return markdown(["arm", "seeds", *names], rows)


def start_value(values: Sequence[float]) -> str:
    """Format a number of the start, which each seed has measured: as one value if all are the same, as greedy answers
    to the same problems are; else by `spread`."""
    if len(set(values)) == 1:
        return spread(values[:1])
    return spread(values)


def until(curve: Sequence[tuple[float, float]], tokens: float) -> float:
    """Return the curve's value at the last point with at most ``tokens`` generated tokens; NaN if there is none.
    ``curve``: (tokens, value), tokens rising."""
    return next((value for at, value in reversed(curve) if at <= tokens), math.nan)


def at_equal_tokens(panels: Mapping[str, Lines]) -> str:
    """Make a table of each arm's values after as many tokens as the shortest run generated in all, formatted by
    `spread`. Empty if there are no curves.

    ``panels``: title → arm → curves of (tokens, value), one a seed.
    """
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


def over_tokens(found: Found, curves: Mapping[str, str]) -> dict[str, Lines]:
    """Smooth the curves over generated tokens by a running mean over a tenth of a run's rows.

    ``curves``: title → name in the record's ``curves``. Returns title → arm → curves of (tokens, value), one a seed.
    """
    panels: dict[str, Lines] = {}
    for title, name in curves.items():
        logged = {arm: [run["curves"][name] for run in runs if run["curves"][name]] for arm, runs in found.items()}
        panels[title] = {arm: [_smooth(curve) for curve in several] for arm, several in logged.items()}
    return panels


def _smooth(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average each value with those before it, over a tenth of the curve."""
    values = [value for _, value in curve]
    width = max(1, len(curve) // 10)
    return [(at, fmean(values[max(0, place - width + 1) : place + 1])) for place, (at, _) in enumerate(curve)]


def pyplot_for(path: Path) -> Any:
    """Return matplotlib's ``pyplot``. If it is not installed, print that there will be no figure ``path``, and return
    None."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        why = "matplotlib is not installed (pip install 'grpo_lab[figures]')"
        print(f"no figure {path}: {why}; --at-most 0 draws what is recorded")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(pyplot: Any, figure: Any, path: Path) -> None:
    """Write ``figure`` to ``path`` as a picture for the docs, and close it."""
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(panels: Mapping[str, Lines], path: Path, over: str, stairs: bool = False, target: float | None = None) -> None:
    """Draw a panel for each title, two in a row. Thin lines are seeds; a thick line is their mean, point by point, as
    far as all seeds go.

    Args:
        panels: title → label → curves of (x, y), one a seed.
        path: the file of the picture.
        over: label of the x axis.
        stairs: a value holds until the next one.
        target: a level that is drawn as a dashed line; None: none.
    """
    pyplot = pyplot_for(path)
    if pyplot is None:
        return
    style: Any = {}
    if stairs:
        style["drawstyle"] = "steps-post"
    beside = min(2, len(panels))
    rows = math.ceil(len(panels) / beside)
    figure, axes = pyplot.subplots(rows, beside, figsize=(4.8 * beside, 3.4 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for colour, (label, curves) in zip(cycle(COLOURS), lines.items(), strict=False):
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=colour, alpha=0.35, linewidth=0.8, **style)
            mean = [[fmean(values) for values in zip(*at, strict=True)] for at in zip(*curves, strict=False)]
            axis.plot(*zip(*mean, strict=True), color=colour, linewidth=2, label=label, **style)
        if target is not None:
            axis.axhline(target, color="black", linestyle="--", linewidth=1)
        axis.set(title=title, xlabel=over)
        axis.xaxis.set_major_formatter("{x:,.9g}")
        axis.locator_params(axis="x", nbins=5)
        axis.grid(**GRID)
        if axis.lines:
            axis.legend(**LEGEND)
    save_figure(pyplot, figure, path)
