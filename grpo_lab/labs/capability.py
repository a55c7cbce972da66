"""The capability lab's report: pass@k by depth before and after RL, and what the lab's rule calls the change.

The rule was written down before the first counted cell: recipes/lab/capability/README.md. A depth is the number of
calculations that a problem takes. Arms are called ``depths, reward``, or by one name. They begin from one start, or
each from its own.

`report` reads depths and k from the titles of the columns (`measured_at`), and from them makes the tables of pass@k, of
gains over the start and of differences between arms, and the figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from grpo_lab.io import write_whole_text
from grpo_lab.labs.cells import Found
from grpo_lab.labs.experiment import Options
from grpo_lab.labs.tables import Lines, draw, interval, markdown, side
from grpo_lab.rewards import AccuracyReward
from grpo_lab.rewards.arithmetic import equation_list
from grpo_lab.rewards.completion import completion_text
from grpo_lab.verifiers.verdict import CORRECT_FROM

COLUMN = re.compile(r"depth (\d+): pass@(\d+)")
REFERENCE = "outcome"
"""Reward that the others are compared with."""
NO_ROOM = 0.95
"""Pass@k of the start from which on a gain at that k is not looked for."""
Values = Mapping[int, float]
"""Seed → number."""


def whole_solution(completions: Sequence[Any], worked_solution: Sequence[str], **columns: Any) -> list[float | None]:
    """Return 1 for a completion with the right answer and the calculations of the worked solution in their order, else
    0; None if its answer cannot be scored.

    The answer alone may be luck: it is one of a few dozen numbers, and there are 128 tries.
    """
    scores = AccuracyReward(mode="strict")(completions=completions, **columns)
    found: list[float | None] = []
    for score, completion, solution in zip(scores, completions, worked_solution, strict=True):
        if score is None:
            found.append(None)
        else:
            same = equation_list(completion_text(completion)) == equation_list(solution)
            found.append(float(score >= CORRECT_FROM and same))
    return found


def report(found: Found, options: Options) -> str:
    """Write ``table.md``, ``gains.md`` (gains over the start, and differences between arms) and ``curves.png``; return
    the text to print."""
    depths, ks = measured_at(found)
    main = table(found, depths, ks)
    gains = "\n\n".join(filter(None, (gains_table(found, depths, ks), differences_table(found, depths, ks))))
    write_whole_text(options.folder / "table.md", f"{main}\n")
    write_whole_text(options.folder / "gains.md", f"{gains}\n")
    draw(curves(found, depths, ks), options.folder / "curves.png", "log2 of k")
    return f"{main}\n\n{gains}"


def measured_at(found: Found) -> tuple[list[int], list[int]]:
    """Return the depths and the k of all columns ``depth D: pass@K``, rising."""
    names = next(iter(found.values()))[0]["after"]
    places = [(int(match[1]), int(match[2])) for name in names if (match := COLUMN.fullmatch(name))]
    depths = sorted({depth for depth, _ in places})
    ks = sorted({k for _, k in places})
    return depths, ks


def after(found: Found, arm: str, depth: int, k: int) -> Values:
    """Return the arm's pass@k after RL, by seed."""
    return {run["seed"]: run["after"][f"depth {depth}: pass@{k}"] for run in found.get(arm, [])}


def own_starts(found: Found) -> bool:
    """Return whether arms begin from different starts, that is, whether their numbers before RL differ for the same
    seed."""
    runs = [run for of_arm in found.values() for run in of_arm if run["before"]]
    measured = {run["seed"]: run["before"] for run in runs}
    return any(run["before"] != measured[run["seed"]] for run in runs)


def before(found: Found, arm: str, depth: int, k: int) -> Values:
    """Return pass@k of the arm's start, by seed. If arms share a start, a seed counts that any of them has measured."""
    if own_starts(found):
        runs = found[arm]
    else:
        runs = [run for of_arm in found.values() for run in of_arm]
    return {run["seed"]: run["before"][f"depth {depth}: pass@{k}"] for run in runs if run["before"]}


def gain(found: Found, arm: str, depth: int, k: int) -> list[float]:
    """Return the arm's gain over its start at pass@k, in points, seed by seed."""
    return points(after(found, arm, depth, k), before(found, arm, depth, k))


def points(one: Values, other: Values) -> list[float]:
    """Return one − other in points, for each seed that both have."""
    return [100 * (one[seed] - other[seed]) for seed in sorted(one) if seed in other]


def verdict(first: Sequence[float], last: Sequence[float], start: Sequence[float]) -> str:
    """Return the rule's word for a change; a dash for fewer than two seeds.

    Args:
        first: gains at the smallest k, in points, seed by seed.
        last: gains at the largest k.
        start: pass@k of the start at the largest k.
    """
    if len(last) < 2:
        return "–"
    if side(last) < 0:
        return "narrows"
    if side(last) > 0 and fmean(start) < NO_ROOM:
        return "adds"
    return {1: "sharpens", -1: "loses", 0: "not shown"}[side(first)]


def word(found: Found, arm: str, depth: int, ks: Sequence[int]) -> str:
    """Return the rule's word for what RL did to the arm at this depth."""
    start = before(found, arm, depth, ks[-1])
    return verdict(gain(found, arm, depth, ks[0]), gain(found, arm, depth, ks[-1]), [*start.values()])


def table(found: Found, depths: Sequence[int], ks: Sequence[int]) -> str:
    """Make the table of pass@k at the smallest and the largest k: a row for each start and arm, a column for each
    depth, and the rule's words."""
    ends = (ks[0], ks[-1])
    starts = {"(start)": next(iter(found))}
    if own_starts(found):
        starts = {f"(start of {arm})": arm for arm in found}
    rows = []
    for title, arm in starts.items():
        rows.append([*row(title, [[before(found, arm, depth, k) for k in ends] for depth in depths]), "–"])
    for arm in found:
        words = "; ".join(word(found, arm, depth, ks) for depth in depths)
        rows.append([*row(arm, [[after(found, arm, depth, k) for k in ends] for depth in depths]), words])
    heads = [f"depth {depth}: pass@{ends[0]}; pass@{ends[1]}" for depth in depths]
    return markdown(["arm", "seeds", *heads, "by the rule"], rows)


def row(title: str, by_depth: Sequence[Sequence[Values]]) -> list[str]:
    """Return the first cells of a row: title, number of seeds, and for each depth the intervals."""
    cells = ["; ".join(interval([*one.values()], ".3f") for one in of_depth) for of_depth in by_depth]
    return [title, str(len(by_depth[-1][0])), *cells]


def gains_table(found: Found, depths: Sequence[int], ks: Sequence[int]) -> str:
    """Make the table of the gains over the start, seed by seed, with the rule's word for each. Below it stands how many
    intervals exclude 0, counting those with two seeds."""
    rows = []
    sides = []
    for arm in found:
        cells = []
        for depth in depths:
            ends = [gain(found, arm, depth, k) for k in (ks[0], ks[-1])]
            said = "; ".join(interval(one, "+.1f") for one in ends)
            cells.append(f"{said}: {word(found, arm, depth, ks)}")
            sides += [side(one) for one in ends if len(one) > 1]
        rows.append([arm, *cells])
    heads = [f"depth {depth}" for depth in depths]
    title = f"Gain over the start at pass@{ks[0]}; at pass@{ks[-1]}, in points, seed by seed:"
    text = f"{title}\n\n{markdown(['arm', *heads], rows)}"
    if sides:
        chance = f"{sum(map(abs, sides))} of {len(sides)} intervals exclude 0; by chance {0.05 * len(sides):.1f} would."
        text += f"\n\n- {chance}"
    return text


def differences_table(found: Found, depths: Sequence[int], ks: Sequence[int]) -> str:
    """Make the table of each arm less the one that it is compared with (`reference_of`); empty if there are none."""
    rows = []
    for arm in found:
        other = reference_of(arm, found)
        if other != arm and other in found:
            cells = []
            for depth in depths:
                ends = [points(after(found, arm, depth, k), after(found, other, depth, k)) for k in (ks[0], ks[-1])]
                cells.append("; ".join(interval(one, "+.1f") for one in ends))
            rows.append([f"{arm} − {other}", *cells])
    if not rows:
        return ""
    heads = [f"depth {depth}" for depth in depths]
    return f"After RL, one arm less another, likewise:\n\n{markdown(['arms', *heads], rows)}"


def reference_of(arm: str, found: Found) -> str:
    """Return the arm that an arm is compared with: that of the same depths with the outcome reward, or for an arm of
    one name the lab's first arm."""
    depths, comma, _ = arm.partition(", ")
    if comma:
        return f"{depths}, {REFERENCE}"
    return next(iter(found))


def curves(found: Found, depths: Sequence[int], ks: Sequence[int]) -> dict[str, Lines]:
    """Return the lines of the figure, pass@k over log2 k: panel → arm → a curve for each seed.

    A panel is a depth and a reward, with the start as its first line. If each arm has its own start, a depth has a
    panel before RL and one after.
    """
    own = own_starts(found)
    panels: dict[str, dict[str, list[list[tuple[float, float]]]]] = {}
    for depth in depths:
        for arm in found:
            name, _, reward = arm.partition(", ")
            start = over_k({k: before(found, arm, depth, k) for k in ks})
            end = over_k({k: after(found, arm, depth, k) for k in ks})
            title = ", ".join(filter(None, (f"depth {depth}: pass@k", reward)))
            if own:
                panels.setdefault(f"{title}, before RL", {})[name] = start
                panels.setdefault(f"{title}, after RL", {})[name] = end
            else:
                lines = panels.setdefault(title, {})
                if start:
                    lines.setdefault("start", start)
                lines[name] = end
    return dict(panels)


def over_k(values: Mapping[int, Values]) -> list[list[tuple[float, float]]]:
    """Return for each seed its curve, the points (log2 k, pass@k). ``values``: k → seed → pass@k."""
    seeds = next(iter(values.values()))
    return [[(math.log2(k), of_k[seed]) for k, of_k in values.items()] for seed in seeds]
