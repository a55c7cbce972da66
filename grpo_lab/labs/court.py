"""The court's report: losses beside each other, by staleness and mismatch of the sampler (recipes/lab/court).

What counts as a difference and as a collapse was written down before the first cell: recipes/lab/court/README.md. Arms
are called ``loss, condition``; a condition is ``k old``, or ``k old, bf16``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.statistics import half_width_over_seeds
from grpo_lab.io import write_whole_text
from grpo_lab.labs.cells import Found
from grpo_lab.labs.experiment import Options
from grpo_lab.labs.tables import COLOURS, GRID, LEGEND, markdown, pyplot_for, save_figure

REFERENCE = "grpo"
"""Loss that the others are compared with."""
FRESH, OLDEST = "0 old", "4 old"
ROUNDED = ", bf16"
ACCURACY, MOST = "pass@1", "pass@16"
Values = Mapping[int, float]
"""Seed → number."""


def collapsed(result: EvaluationResult | None, log: Sequence[Mapping[str, Any]]) -> float:
    """Return 1 if the cell collapsed, else 0: the samples of the last quarter of its steps are right less than half as
    often as those of its best stretch of as many steps, or the training ended in numbers that are not finite."""
    rewards = [row["rewards/accuracy_reward/mean"] for row in log if "rewards/accuracy_reward/mean" in row]
    if not rewards or not all(map(math.isfinite, rewards)):
        return 1.0
    width = max(1, len(rewards) // 4)
    stretches = [fmean(rewards[at : at + width]) for at in range(len(rewards) - width + 1)]
    return float(stretches[-1] < max(stretches) / 2)


def report(found: Found, options: Options) -> str:
    """Write ``table.md`` and ``curves.png``; return the text to print."""
    losses = list(dict.fromkeys(arm.split(", ", 1)[0] for arm in found))
    conditions = list(dict.fromkeys(arm.split(", ", 1)[1] for arm in found))
    text = f"{table(found, losses, conditions)}\n\n{verdicts(whole_seeds(found), losses, conditions)}"
    write_whole_text(options.folder / "table.md", f"{text}\n")
    draw(found, losses, conditions, options.folder / "curves.png")
    return text


def values(found: Found, loss: str, condition: str, name: str) -> Values:
    """Return the numbers ``name`` of a cell's runs: seed → number."""
    return {run["seed"]: run["after"][name] for run in found.get(f"{loss}, {condition}", [])}


def interval(numbers: Sequence[float], form: str = ".3f") -> str:
    """Format the mean with half of its 95% interval over seeds, if there are two."""
    if not numbers:
        return "–"
    half = half_width_over_seeds(numbers)
    return f"{fmean(numbers):{form}}" + ("" if half is None else f" ± {half:{form.lstrip('+')}}")


def table(found: Found, losses: Sequence[str], conditions: Sequence[str]) -> str:
    """Make a table of pass@1, pass@16 and collapses: a row a loss, a column a condition."""
    rows = []
    for loss in losses:
        seeds = max(len(values(found, loss, condition, ACCURACY)) for condition in conditions)
        cells = []
        for condition in conditions:
            ones, many, falls = (
                [*values(found, loss, condition, name).values()] for name in (ACCURACY, MOST, "collapsed")
            )
            cells.append(f"{interval(ones)}; {fmean(many):.2f}; {int(sum(falls))}" if ones else "–")
        rows.append([loss, str(seeds), *cells])
    heads = [f"{condition}: {ACCURACY}; {MOST}; collapses" for condition in conditions]
    return markdown(["loss", "seeds", *heads], rows)


def paired(one: Values, other: Values) -> list[float]:
    return [one[seed] - other[seed] for seed in one if seed in other]


def comparisons(found: Found, losses: Sequence[str], conditions: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return the planned comparisons in points of pass@1, seed by seed: title → loss → differences. Each side is a mean
    over its conditions."""

    def over(kept: Sequence[str], loss: str) -> Values:
        of = [values(found, loss, condition, ACCURACY) for condition in kept]
        if of:
            seeds = set.intersection(*(set(one) for one in of))
        else:
            seeds = set()
        return {seed: 100 * fmean(one[seed] for one in of) for seed in sorted(seeds)}

    exact = [condition for condition in conditions if not condition.endswith(ROUNDED)]
    rounded = [condition for condition in conditions if condition.endswith(ROUNDED)]
    stale = [condition for condition in conditions if condition.startswith(OLDEST)]
    fresh = [condition for condition in conditions if condition.startswith(FRESH)]
    others = [loss for loss in losses if loss != REFERENCE]
    return {
        f"{OLDEST} − {FRESH}": {loss: paired(over(stale, loss), over(fresh, loss)) for loss in losses},
        "bf16 − exact": {loss: paired(over(rounded, loss), over(exact, loss)) for loss in losses},
        f"− {REFERENCE}, {FRESH}": {loss: paired(over(fresh, loss), over(fresh, REFERENCE)) for loss in others},
        f"− {REFERENCE}, {OLDEST}": {loss: paired(over(stale, loss), over(stale, REFERENCE)) for loss in others},
    }


def verdicts(found: Found, losses: Sequence[str], conditions: Sequence[str]) -> str:
    """Return the planned comparisons as a table, and in words which of their intervals exclude 0 and which cells
    collapsed."""
    planned = comparisons(found, losses, conditions)
    rows = [[loss, *(interval(of.get(loss, []), "+.1f") for of in planned.values())] for loss in losses]
    said = ["Points of pass@1, seed by seed:", "", markdown(["loss", *planned], rows), ""]
    intervals = [one for of in planned.values() for one in of.values() if len(one) > 1]
    for title, of in planned.items():
        apart = [f"{loss} {interval(one, '+.1f')}" for loss, one in of.items() if excludes_zero(one)]
        said.append(f"- {title}: {', '.join(apart) or 'none'} told from 0, of {len(of)}.")
    many = sum(map(excludes_zero, intervals))
    said.append(f"- {many} of {len(intervals)} intervals exclude 0; by chance {0.05 * len(intervals):.1f} would.")
    falls = {arm: int(sum(run["after"]["collapsed"] for run in runs)) for arm, runs in found.items()}
    fallen = [f"{arm} ({count} of {len(found[arm])})" for arm, count in falls.items() if count]
    said.append(f"- Collapsed: {'; '.join(fallen) or 'none'}.")
    return "\n".join(said)


def excludes_zero(differences: Sequence[float]) -> bool:
    """Return whether the 95% interval of the mean does not hold 0; False for fewer than two."""
    half = half_width_over_seeds(differences)
    return half is not None and abs(fmean(differences)) > half


def whole_seeds(found: Found) -> Found:
    """Return the runs of those seeds that every arm has."""
    seeds = set.intersection(*({run["seed"] for run in runs} for runs in found.values()))
    return {arm: [run for run in runs if run["seed"] in seeds] for arm, runs in found.items()}


def draw(found: Found, losses: Sequence[str], conditions: Sequence[str], path: Path) -> None:
    """Draw pass@1 over staleness, a panel for each kind of mismatch, a line for each loss with its 95% intervals."""
    pyplot = pyplot_for(path)
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(2, 1, figsize=(9.6, 8.4), sharex=True, sharey=True)
    for axis, (title, rounded) in zip(axes, (("exact sampler", False), ("sampler rounded to bf16", True)), strict=True):
        shown = [condition for condition in conditions if condition.endswith(ROUNDED) is rounded]
        for at, (loss, colour, mark) in enumerate(zip(losses, cycle(COLOURS), cycle("osD^vPX"), strict=False)):
            points = [[*values(found, loss, condition, ACCURACY).values()] for condition in shown]
            places = [place + (at - len(losses) / 2) * 0.8 / len(losses) for place, one in enumerate(points) if one]
            means = [fmean(one) for one in points if one]
            halves = [half_width_over_seeds(one) or 0.0 for one in points if one]
            how: Any = {"color": colour, "marker": mark, "markersize": 5, "linewidth": 0.6, "elinewidth": 1.2}
            axis.errorbar(places, means, yerr=halves, label=loss, capsize=2, **how)
        axis.set(title=title, ylabel=ACCURACY, xticks=range(len(shown)))
        axis.set_xticklabels([f"{condition.split(' ')[0]} batches old" for condition in shown])
        axis.grid(axis="y", **GRID)
    axes[0].legend(ncols=1, loc="upper left", bbox_to_anchor=(1.0, 1.0), **LEGEND)
    save_figure(pyplot, figure, path)
