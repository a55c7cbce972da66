"""Tables and figure of the lab `search`: accuracy over tokens, the space, the judges, and the loop.

`report` makes each table whose records are there. A record is what ``search.run`` returned for one arm and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo_lab.evaluation.statistics import Interval, accuracy_interval, clustered_interval, paired_difference
from grpo_lab.evaluation.terminal import NOT_RECORDED, points
from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import Found, Options
from grpo_lab.labs.tables import draw, markdown

BASELINE = "majority"
"""Method that the others are compared with."""
LOOP_MEASURES = {"greedy": "greedy", "search": "tree search, value", "majority": "majority"}
"""Key of a measure after each round of a loop → its name in the table."""


def report(found: Found, options: Options) -> str:
    """Write ``table.md`` and ``curves.png``; return the text to print."""
    records = [record for runs in found.values() for record in runs]
    methods = by_method([record for record in records if "methods" in record])
    parts = []
    if methods:
        parts.append(markdown(*methods_table(methods, records)))
    for name, table in (("space", space_table), ("judges", judges_table)):
        if name in found:
            parts.append(markdown(*table([record[name] for record in found[name]])))
    loops = {arm: [record["loop"] for record in runs] for arm, runs in found.items() if "loop" in runs[0]}
    if loops:
        parts.append(markdown(*loop_table(loops)))
    text = "\n\n".join(parts)
    place = options.folder / "table.md"
    write_whole_text(place, f"{text}\n")
    lines = {"accuracy": {name: [curve(one) for one in runs] for name, runs in methods.items()}}
    draw(lines, place.with_name("curves.png"), "tokens generated for a problem")
    return f"{text}\n\n{place}, {place.with_name('curves.png')}"


def by_method(records: Sequence[Any]) -> dict[str, list[Any]]:
    """Return method → what it measured with each seed."""
    names = dict.fromkeys(name for record in records for name in record["methods"])
    return {name: [one["methods"][name] for one in records if name in one["methods"]] for name in names}


def curve(run: Any) -> list[tuple[float, float]]:
    """Return the points (tokens, accuracy) of a method with one seed, one for each budget."""
    return [(tokens, fmean(right)) for tokens, right in zip(run["tokens"], run["right"], strict=True)]


def pooled(runs: Sequence[Any], place: int) -> list[bool]:
    """Return whether each problem of all seeds is right, at the budget with index ``place``."""
    return [bool(one) for run in runs for one in run["right"][place]]


def shown(interval: Interval | None) -> str:
    """Format a share with its 95% limits; None as a dash."""
    if interval is None:
        return NOT_RECORDED
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def methods_table(methods: dict[str, list[Any]], records: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Make the main table: head and rows, a row for each method.

    It has the accuracy at each budget. At the largest budget it also has the difference to majority, the tokens used,
    the share of problems for which a right solution was found, and the share of these that were answered wrongly.
    """
    budgets = next(record["budgets"] for record in records if "budgets" in record)
    heads = ["method", "seeds", *(f"{budget} tokens" for budget in budgets)]
    heads += [f"− {BASELINE}, points", "tokens used", "a right one found", "of these answered wrongly"]
    rows = []
    for name, runs in methods.items():
        last = pooled(runs, -1)
        had = [bool(one) for run in runs for one in run["had"]]
        misled = [not right for right, there in zip(last, had, strict=True) if there]
        difference = NOT_RECORDED
        if name != BASELINE and len(methods.get(BASELINE, [])) == len(runs):
            difference = points(paired_difference(pooled(methods[BASELINE], -1), last))
        row = [name, str(len(runs)), *(shown(accuracy_interval(pooled(runs, place))) for place in range(len(budgets)))]
        row += [difference, f"{fmean(run['tokens'][-1] for run in runs):.0f}", f"{fmean(had):.3f}"]
        rows.append([*row, shown(accuracy_interval(misled))])
    return heads, rows


def space_table(runs: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Make the table of the space (`space_measured`): head and rows, a row for each number of proposals of a node."""
    rows = []
    for width in runs[0]:
        inside = [bool(one) for run in runs for one in run[width]["inside"]]
        paths = fmean(count for run in runs for count in run[width]["paths"])
        steps = fmean(run[width]["steps"] for run in runs)
        rows.append([width, f"{steps:.2f}", f"{paths:,.1f}", shown(accuracy_interval(inside))])
    return ["proposals a node", "different steps", "paths of the whole tree", "problems whose right way is in it"], rows


def judges_table(runs: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Make the table of the judges (`judges_measured`): head and rows, a row for each judge and number of steps done.

    It says how often the judge's value and the exact one lie on the same side of ½, how often one would be right who
    always says the commoner side, and how far apart the two values are on average.
    """
    rows = []
    for name in runs[0]:
        depths = sorted({depth for run in runs for depth, _, _ in run[name]})
        for depth in depths:
            pairs = [(value, exact) for run in runs for at, value, exact in run[name] if at == depth]
            same = [(value > 0.5) == (exact > 0.5) for value, exact in pairs]
            good = fmean(exact > 0.5 for _, exact in pairs)
            apart = fmean(abs(value - exact) for value, exact in pairs)
            row = [name, str(depth), str(len(pairs)), shown(accuracy_interval(same))]
            rows.append([*row, f"{max(good, 1 - good):.3f}", f"{apart:.3f}"])
    return ["judge", "steps done", "states", "same side of ½", "if always the commoner side", "mean distance"], rows


def loop_table(loops: dict[str, list[Any]]) -> tuple[list[str], list[list[str]]]:
    """Make the table of the loops: head and rows, a row for the start and for each round.

    If there are two loops of equal length, a last row has the differences between their last rounds. ``loops``: arm →
    its rounds, with each seed.
    """
    heads = ["rows from", "rounds", *LOOP_MEASURES.values(), "gain, greedy", "search − majority"]
    heads += ["value ranks rightly", "solved", "right solutions"]
    rows = []
    for arm, runs in loops.items():
        start = held_out_right(runs, 0, "greedy")
        for number in range(len(runs[0])):
            right = {name: held_out_right(runs, number, name) for name in LOOP_MEASURES}
            row = [arm, str(number), *(shown(accuracy_interval(own)) for own in right.values())]
            row.append(points(paired_difference(start, right["greedy"])))
            row.append(points(paired_difference(right["majority"], right["search"])))
            shares = [one for run in runs for one in run[number]["ranked"] if one is not None]
            row.append(shown(clustered_interval(shares, 1)))
            rows.append([*row, *(mean_of_round(runs, number, name) for name in ("solved", "right_found"))])
    if len(loops) == 2 and len({len(runs) for runs in loops.values()}) == 1:
        first, second = loops.values()
        differences = [
            points(paired_difference(held_out_right(first, -1, name), held_out_right(second, -1, name)))
            for name in LOOP_MEASURES
        ]
        rows.append([" less ".join([*loops][::-1]), "last", *differences, *[""] * 5])
    return heads, rows


def held_out_right(runs: Sequence[Any], number: int, name: str) -> list[bool]:
    """Return whether each held-out problem of all seeds is right after a round, by the measure ``name``."""
    return [bool(one) for run in runs for one in run[number][name]]


def mean_of_round(runs: Sequence[Any], number: int, name: str) -> str:
    """Format the mean over seeds of what a round found; empty for the start, which has found nothing."""
    if number == 0:
        return ""
    return f"{fmean(run[number][name] for run in runs):.3g}"
