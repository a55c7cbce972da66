"""The stages of a pipeline as boxes and arrows: who takes from whom → pixel coordinates, for `figure.html.j2`.

A box stands below every box that it takes from, in one of a few columns, so that a phone has room for all of them. An
arrow to the next row is a curve; one that passes rows runs down the gap between two columns, and so behind no box.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

DROP, GAP, LINE = 32.0, 26.0, 17.0
"""Between two rows, between two columns, from a line to the next; pixels of the viewBox."""
CHARACTER = 6.9
"""How wide one is, on average."""
MOST_LINES = 4
_LANES = (0.0, 5.0, -5.0, 9.0, -9.0)


class Drawn(NamedTuple):
    """A stage as it is drawn. ``state``: a class of the style sheet; ``about``, ``facts``: what stands under its name,
    each a line, or more of them where there is room; ``before``: those that it takes from."""

    name: str
    state: str
    about: Sequence[str]
    facts: Sequence[str]
    before: Sequence[str]


def drawing(stages: Sequence[Drawn], columns: int, width: float) -> SimpleNamespace:
    """``stages``, each after those that it takes from, in at most ``columns`` boxes of ``width`` a row."""
    rows = _rows(stages, columns)
    column = _columns(stages, rows, columns)
    fits = int((width - 22) / CHARACTER)
    lines = {one.name: [*_wrapped(one.about, fits), *_wrapped(one.facts, fits)][:MOST_LINES] for one in stages}
    height = 30 + LINE * max(map(len, lines.values()), default=0)
    places = {one.name: (1 + column[one.name] * (width + GAP), 1 + rows[one.name] * (height + DROP)) for one in stages}
    boxes = [
        SimpleNamespace(
            x=places[one.name][0],
            y=places[one.name][1],
            state=one.state,
            name=_cut(one.name, int(0.87 * fits)),
            lines=lines[one.name],
            said=", ".join([one.name, *one.about, *one.facts]),
        )
        for one in stages
    ]
    lanes: Counter[int] = Counter()
    arrows = []
    for name, other in [(one.name, other) for one in stages for other in one.before]:
        x, y = places[other][0] + width / 2, places[other][1] + height
        to_x, to_y = places[name][0] + width / 2, places[name][1]
        if rows[name] == rows[other] + 1:
            path = f"M{x:g} {y:g}{_bend(x, y, to_x)}"
        else:
            gap = column[name] + (column[other] >= column[name])
            at = gap * (width + GAP) - GAP / 2 + _LANES[lanes[gap] % len(_LANES)]
            lanes[gap] += 1
            path = f"M{x:g} {y:g}{_bend(x, y, at)}V{to_y - DROP:g}{_bend(at, to_y - DROP, to_x)}"
        arrows.append((path, f"M{to_x - 4:g} {to_y - 7:g}h8l-4 7z"))
    used, last = 1 + max(column.values(), default=0), max(rows.values(), default=0)
    size = {"width": used * (width + GAP), "height": 2 + (last + 1) * (height + DROP) - DROP}
    return SimpleNamespace(**size, box={"width": width, "height": height}, boxes=boxes, arrows=arrows)


def _bend(x: float, y: float, to_x: float) -> str:
    """From one row to the next."""
    half = y + DROP / 2
    return f"C{x:g} {half:g} {to_x:g} {half:g} {to_x:g} {y + DROP:g}"


def _rows(stages: Sequence[Drawn], columns: int) -> dict[str, int]:
    """The first row below all that a stage takes from which has a column left."""
    rows: dict[str, int] = {}
    full: Counter[int] = Counter()
    for one in stages:
        row = 1 + max((rows[other] for other in one.before), default=-1)
        while full[row] == columns:
            row += 1
        rows[one.name] = row
        full[row] += 1
    return rows


def _columns(stages: Sequence[Drawn], rows: Mapping[str, int], columns: int) -> dict[str, int]:
    """The column of what a stage takes, or the nearest that is free; what others take comes before a last one."""
    taken = {other for one in stages for other in one.before}
    column: dict[str, int] = {}
    free = {row: list(range(columns)) for row in rows.values()}
    for one in sorted(stages, key=lambda one: (rows[one.name], one.name not in taken)):
        wanted = column[max(one.before, key=lambda other: rows[other])] if one.before else 0
        column[one.name] = min(free[rows[one.name]], key=lambda place: (abs(place - wanted), place))
        free[rows[one.name]].remove(column[one.name])
    return column


def _wrapped(words: Sequence[str], fits: int) -> list[str]:
    """Joined in lines of at most ``fits`` characters."""
    lines: list[str] = []
    for word in words:
        joined = f"{lines[-1]} · {word}" if lines else ""
        lines[-1:] = [joined] if lines and len(joined) <= fits else [*lines[-1:], _cut(word, fits)]
    return lines


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
