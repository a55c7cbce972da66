"""Tables of ``bench_accuracy.py``: when a run reached a target, whose rate is taken, stock's time against ours.

A run's record has ``seed``, ``wall_seconds`` and ``points``, its evaluations in order. *Stock* is TRL's trainer, *ours*
is LabTrainer. An *arm* is a side of the comparison, such as ``stock`` or ``ours``; it has a run for each seed. Not a
command: ``bench_accuracy.py`` prints the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from grpo_lab.labs.experiment import Found, Record
from grpo_lab.labs.tables import markdown

Point = dict[str, float]
"""One evaluation: ``step`` (optimizer steps so far), ``seconds`` of training so far, and held-out ``accuracy``."""

TUNED, SERVED = ("stock", "ours"), ("synchronous", "overlapped")
SHARE = 0.9
"""The target accuracy, as a share of stock's final accuracy."""
BELOW = 0.02
"""A tuning whose final accuracy is this much below the arm's best is not chosen."""
LAST = 3
"""Number of evaluations of which the final accuracy is the mean."""


def final(one: Record) -> float:
    """Return the final accuracy of a run."""
    return fmean(point["accuracy"] for point in one["points"][-LAST:])


def whole(one: Record) -> float:
    """Return the seconds that all steps of a run took."""
    return float(one["points"][-1]["seconds"])


def reached(one: Record, target: float) -> Point | None:
    """Return the first evaluation at or above the accuracy ``target``, or None."""
    return next((point for point in one["points"] if point["accuracy"] >= target), None)


def seconds_to(one: Record, target: float) -> float:
    """Return the seconds of training until the first evaluation at or above ``target``; infinity if it never is."""
    point = reached(one, target)
    return math.inf if point is None else point["seconds"]


def chosen(tests: Mapping[tuple[str, str], Record]) -> tuple[dict[str, str], float]:
    """Choose the tuning of each arm from its test runs: the one that reaches the target first or, if none does, the one
    with the highest final accuracy. Tunings that end more than `BELOW` below the arm's best are left out: they may be
    fast at first, and do not stay there.

    Args:
        tests: (arm, tuning) → the record of its test run.

    Returns:
        Arm → its tuning, and the target accuracy: `SHARE` of the best final accuracy of stock's test runs.
    """
    target = SHARE * max(final(one) for (arm, _), one in tests.items() if arm == "stock")
    best: dict[str, tuple[float, float, str]] = {}
    for (arm, tuning), one in tests.items():
        if final(one) < max(final(other) for (side, _), other in tests.items() if side == arm) - BELOW:
            continue
        key = (seconds_to(one, target), -final(one), tuning)
        best[arm] = min(best.get(arm, key), key)
    return {arm: key[-1] for arm, key in best.items()}, target


def told(one: Record, target: float) -> list[str]:
    """Return a run's cells of a table: steps and seconds to ``target``, final accuracy, seconds of all steps, and
    seconds of the whole run."""
    point = reached(one, target)
    first = ["never", "never"] if point is None else [f"{point['step']:.0f}", f"{point['seconds']:.1f}"]
    return [*first, f"{final(one):.3f}", f"{whole(one):.1f}", f"{one['wall_seconds']:.1f}"]


def ratio(above: float, below: float) -> str:
    """Return the quotient as text; – if one of the two times is infinite (the target was never reached)."""
    return f"{above / below:.2f}×" if math.isfinite(above) and math.isfinite(below) and below > 0 else "–"


def main_table(found: Found, target: float) -> str:
    """Return a Markdown table with a line for each run, and a line with the means for each arm of several seeds. The
    last two columns are quotients of seconds to the target."""
    heads = ["arm", "seed", "steps to target", "seconds to target", "final accuracy", "seconds of all steps"]
    heads += ["with loading", "stock / this", "this / ours"]
    times = {arm: {one["seed"]: seconds_to(one, target) for one in runs} for arm, runs in found.items()}
    rows = []
    for arm, runs in found.items():
        for one in runs:
            seed = one["seed"]
            own = times[arm][seed]
            stock, ours = (times.get(side, {}).get(seed, math.inf) for side in TUNED)
            rows.append([arm, str(seed), *told(one, target), ratio(stock, own), ratio(own, ours)])
        if len(runs) > 1:
            stock, ours, own = (mean_over(times.get(side, {}), times[arm]) for side in (*TUNED, arm))
            rows.append([f"**{arm}**", "mean", *told_on_average(runs, target), ratio(stock, own), ratio(own, ours)])
    return markdown(heads, rows)


def told_on_average(runs: list[Record], target: float) -> list[str]:
    """Return the cells of `told` as means over the runs of an arm; steps and seconds only if all reach ``target``."""
    points = [point for one in runs if (point := reached(one, target)) is not None]
    steps = "never"
    seconds = "never"
    if len(points) == len(runs):
        steps = f"{fmean(point['step'] for point in points):.1f}"
        seconds = f"{fmean(point['seconds'] for point in points):.1f}"
    wall = fmean(one["wall_seconds"] for one in runs)
    return [steps, seconds, f"{fmean(map(final, runs)):.3f}", f"{fmean(map(whole, runs)):.1f}", f"{wall:.1f}"]


def mean_over(times: Mapping[int, float], seeds: Iterable[int]) -> float:
    """Return the mean of ``times`` (by seed) over ``seeds``; infinity if a seed has no time."""
    return fmean(times.get(seed, math.inf) for seed in seeds)


def overlap_table(found: Found) -> str:
    """Return a Markdown table of the two arms with a server, with a line for each seed; "" if no seed has both."""
    one, two = ({run["seed"]: run for run in found.get(arm, [])} for arm in SERVED)
    rows = []
    for seed in sorted(set(one) & set(two)):
        ends, spent = [[get(side[seed]) for side in (one, two)] for get in (final, whole)]
        points = f"{100 * (ends[1] - ends[0]):+.1f}"
        rows.append([str(seed), *map("{:.3f}".format, ends), points, *map("{:.1f}".format, spent), ratio(*spent)])
    heads = ["seed", *(f"{arm}: final accuracy" for arm in SERVED), "points"]
    return markdown([*heads, *(f"{arm}: seconds of all steps" for arm in SERVED), "gain"], rows) if rows else ""


def in_all(found: Found, target: float) -> str:
    """Return a sentence with stock's time to the target over ours, on the seeds that both have: the quotient of the
    means, and the smallest quotient of a seed."""
    stock, ours = ({one["seed"]: seconds_to(one, target) for one in found.get(side, [])} for side in TUNED)
    seeds = sorted(set(stock) & set(ours))
    if not seeds:
        return "stock / ours: no seed that both have"
    if not all(math.isfinite(times[seed]) for times in (stock, ours) for seed in seeds):
        return f"stock / ours: no ratio in all, a run never reaches the target (seeds {seeds})"
    least = min(seeds, key=lambda seed: stock[seed] / ours[seed] if ours[seed] else math.inf)
    of_means = ratio(mean_over(stock, seeds), mean_over(ours, seeds))
    return f"stock / ours: {of_means} of the means, least {ratio(stock[least], ours[least])} (seeds {seeds})"
