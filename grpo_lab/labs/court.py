"""The court's report: losses beside each other, by staleness and mismatch of the sampler (recipes/lab/court).

What counts as a difference and as a collapse was written down before the first cell: recipes/lab/court/README.md. Arms
are called ``loss, condition``. A condition is ``k old`` (the sampler is k generation batches behind), or ``k old,
bf16`` (its weights are also rounded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.statistics import half_width_over_seeds
from grpo_lab.io import write_whole_text
from grpo_lab.labs.cells import Found
from grpo_lab.labs.experiment import Options
from grpo_lab.labs.tables import COLOURS, GRID, interval, markdown, pyplot_for, save_figure, side

REFERENCE = "grpo"
"""Loss that the others are compared with."""
FRESH = "0 old"
OLDEST = "4 old"
ROUNDED = ", bf16"
"""Conditions of the planned comparisons, and how the name of a rounded one ends."""
ACCURACY = "pass@1"
MOST = "pass@16"
"""Columns of the lab file that the report reads."""
TOLD_APART = COLOURS[1]
NOT_TOLD_APART = COLOURS[4]
WIDEST = (-75, 50)
"""Points of pass@1 that a panel of the figure shows."""
Values = Mapping[int, float]
"""Seed → number."""


def collapsed(result: EvaluationResult | None, log: Sequence[Mapping[str, Any]]) -> float:
    """Return 1 if a cell's training collapsed, else 0.

    It collapsed if the samples of the last quarter of its steps are right less than half as often as those of its best
    stretch of as many steps, or if the reward was never logged or is not finite somewhere. ``log``: rows of
    `metrics.jsonl`.
    """
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
    """Return the numbers ``name`` of an arm's runs, by seed."""
    return {run["seed"]: run["after"][name] for run in found.get(f"{loss}, {condition}", [])}


def table(found: Found, losses: Sequence[str], conditions: Sequence[str]) -> str:
    """Make the table of pass@1, pass@16 and collapses: a row for each loss, a column for each condition."""
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
    """Return one − other for each seed that both have."""
    return [one[seed] - other[seed] for seed in one if seed in other]


def comparisons(found: Found, losses: Sequence[str], conditions: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return the planned comparisons: title → loss → differences in points of pass@1, seed by seed.

    Each side of a comparison is a mean over its conditions, and has the seeds that all of these have.
    """

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
    head = "Points of pass@1, seed by seed. Each side is a mean over its columns above (`4 old`: exact and bf16):"
    said = [head, "", markdown(["loss", *planned], rows), ""]
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
    """Return whether the 95% interval of the mean excludes 0; False for fewer than two differences."""
    return side(differences) != 0


def whole_seeds(found: Found) -> Found:
    """Return the runs of those seeds that every arm has."""
    seeds = set.intersection(*({run["seed"] for run in runs} for runs in found.values()))
    return {arm: [run for run in runs if run["seed"] in seeds] for arm, runs in found.items()}


def draw(found: Found, losses: Sequence[str], conditions: Sequence[str], path: Path) -> None:
    """Draw the planned comparisons: a panel for each, a row for each loss. A row shows the mean with its 95% interval,
    coloured if it excludes 0, and the seeds as dots."""
    pyplot = pyplot_for(path)
    if pyplot is None:
        return
    planned = comparisons(found, losses, conditions)
    rows = {loss: len(losses) - at for at, loss in enumerate(losses)}  # the first loss is on top
    figure, axes = pyplot.subplots(1, len(planned), figsize=(11.6, 0.9 + 0.36 * len(losses)), sharey=True)
    for axis, (title, of) in zip(axes, planned.items(), strict=True):
        for loss, differences in of.items():
            if differences:
                draw_row(axis, rows[loss], differences)
        axis.axvline(0, color="0.3")
        axis.set(title=title, xlabel=f"points of {ACCURACY}", xlim=WIDEST)
        axis.set_yticks(list(rows.values()), list(rows))
        axis.grid(axis="x", **GRID)
    save_figure(pyplot, figure, path)


def draw_row(axis: Any, height: float, differences: Sequence[float]) -> None:
    """Draw the differences of one loss: a dot for each seed, and their mean with its interval."""
    if excludes_zero(differences):
        colour = TOLD_APART
    else:
        colour = NOT_TOLD_APART
    half = half_width_over_seeds(differences) or 0.0
    axis.plot(differences, [height] * len(differences), ".", color="0.6")
    axis.errorbar(fmean(differences), height, xerr=half, fmt="o", color=colour, capsize=2)
