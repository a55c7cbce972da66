"""Charts: compute the pixel coordinates of series.

`draw` turns lines of (x, y) into numbers and texts. The template `figure.html.j2` makes SVG of them and escapes every
text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

Points = Sequence[tuple[float, float]]

WIDTH = 480.0
HEIGHT = 264.0
LEFT = 50.0
RIGHT = 14.0
TOP = 14.0
BOTTOM = 42.0
"""Pixels: size of a chart, and its margins."""
SECOND_AXIS = 26.0
"""Pixels added to the right margin of a chart with a right axis."""
SMOOTH_FROM = 20
"""Number of points from which on a series is smoothed."""
_MOST_POINTS = 300
"""Number of points that a path has at most, about."""

# Okabe & Ito's colour-blind-safe palette; the dash tells lines apart without any colour at all.
STYLES = [
    *[("#0072B2", ""), ("#D55E00", "7 4"), ("#009E73", "2 3"), ("#A8558A", "9 3 2 3"), ("#6B7280", "1 3")],
    *[("#B8860B", "12 4"), ("#3A9BD9", "5 2 1 2"), ("#000000", "3 6")],
]


class Line(NamedTuple):
    """A named series of a chart.

    Attributes:
        label: its name in the legend.
        points: (x, y), by rising x.
        errors: (low, high) of the error bar at each point; empty: no bars.
        markers: draw a dot at every point, however many there are.
    """

    label: str
    points: Points
    errors: Sequence[tuple[float, float]] = ()
    markers: bool = False


class Tick(NamedTuple):
    """A mark on an axis: its coordinate in pixels and its label."""

    at: float
    text: str


class Figure(NamedTuple):
    """A chart made by `draw`, its title, and a sentence on what to look for in it (``meaning``)."""

    title: str
    meaning: str
    chart: SimpleNamespace


def figure(title: str, meaning: str, lines: Sequence[Line], unit: str, **shape: Any) -> Figure | None:
    """Draw those ``lines`` that have points as a figure; return None if none has. ``shape``: further arguments of
    `draw`."""
    if any(line.points for line in lines):
        return Figure(title, meaning, draw(lines, unit=unit, **shape))
    return None


def draw(
    lines: Sequence[Line],
    *,
    unit: str,
    share: bool = False,
    from_zero: bool = False,
    rule: tuple[float, str] | None = None,
    right: Sequence[Line] = (),
    right_unit: str = "",
    x_unit: str = "optimizer step",
) -> SimpleNamespace:
    """Compute everything that the template needs to draw a chart.

    Args:
        lines: the series on the left axis; one of them must have a point, and those without points are left out.
        unit: unit of the left axis.
        share: the left axis shows values in [0, 1], written in per cent, and begins at 0.
        from_zero: the left axis begins at 0, unless a value is negative.
        rule: (value, label) of a horizontal line; it is left out if the axis does not reach it.
        right: series on an axis of their own on the right, which begins at 0, unless a value is negative.
        right_unit: unit of the right axis.
        x_unit: label of the x axis.

    Returns:
        SimpleNamespace of lines, ticks and texts. Coordinates are pixels of a picture of ``WIDTH`` × ``HEIGHT``.
    """
    lines = [line for line in lines if line.points]
    right = [line for line in right if line.points]
    every = [*lines, *right]
    show = _percent if share else _plain
    steps = [x for line in every for x, _ in line.points]
    first = min(steps)
    last = max(steps)
    if first == last:
        first -= 1
        last += 1
    edge = WIDTH - RIGHT - (SECOND_AXIS if right else 0.0)
    x = _scale(first, last, LEFT + 6, edge - 6)
    y_at, y = _axis(lines, from_zero or share, share)
    right_at, right_y = _axis(right, True, False) if right else ([], y)
    x_name = x_unit.removeprefix("optimizer ")
    on_axes = [*((line, y, show) for line in lines), *((line, right_y, _plain) for line in right)]
    drawn = [
        _draw_line(line, style, x, axis, write, x_name)
        for (line, axis, write), style in zip(on_axes, cycle(STYLES), strict=False)
    ]
    return SimpleNamespace(
        unit=unit,
        lines=drawn,
        x_ticks=[Tick(x(t), _plain(t)) for t in nice_ticks(first, last, 6, whole=True) if first <= t <= last],
        y_ticks=[Tick(y(t), show(t)) for t in y_at],
        smoothing=max(smoothing_window(len(line.points)) for line in every),
        description="; ".join(f"{line.label}: from {line.first} to {line.last}" for line in drawn),
        rule=Tick(y(rule[0]), rule[1]) if rule is not None and y_at[0] <= rule[0] <= y_at[-1] else None,
        right_ticks=[Tick(right_y(t), _plain(t)) for t in right_at],
        right_unit=right_unit if right else "",
        box={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": edge, "top": TOP, "bottom": HEIGHT - BOTTOM},
        x_unit=x_unit,
    )


def _axis(lines: Sequence[Line], from_zero: bool, share: bool) -> tuple[list[float], Callable[[float], float]]:
    """Return the ticks of a y axis that covers ``lines``, and the function from a value to its pixel."""
    values = [y for line in lines for _, y in line.points]
    values += [y for line in lines for pair in line.errors for y in pair]
    low = min(values)
    high = max(values)
    if from_zero and low >= 0:
        low = 0.0
        # A share that fills half of the scale gets the whole one; a small one is magnified.
        if share and 0.5 < high <= 1:
            high = 1.0
        else:
            high = max(high, 0.01 if share else 0.0)
    if high - low < 1e-12 * max(1.0, abs(high)):
        margin = abs(high) * 0.1 or 1.0
        if low != 0 or not from_zero:
            low -= margin
        high += margin
    at = nice_ticks(low, high, 4)
    return at, _scale(min(low, at[0]), max(high, at[-1]), HEIGHT - BOTTOM, TOP)


def _draw_line(
    line: Line,
    style: tuple[str, str],
    x: Callable[[float], float],
    y: Callable[[float], float],
    show: Callable[[float], str],
    x_name: str,
) -> SimpleNamespace:
    """Convert a line to pixels: SVG paths of the logged values (``raw``; empty if they are not smoothed) and of their
    moving average (``smooth``), labelled dots, error bars, and the first and last value of the average as text.

    Args:
        style: colour and dash.
        x: function from a value to its pixel on the x axis.
        y: function from a value to its pixel on the y axis.
        show: function from a value to its text.
        x_name: what the label of a dot calls x.
    """
    smoothed = smooth(line.points)
    lone = len(line.points) < SMOOTH_FROM or line.markers
    return SimpleNamespace(
        label=line.label,
        colour=style[0],
        dash=style[1],
        raw=_path(envelope(line.points), x, y) if smoothing_window(len(line.points)) > 1 else "",
        smooth=_path(thinned(smoothed), x, y),
        dots=[(x(a), y(b), f"{x_name} {_plain(a)}: {show(b)}") for a, b in line.points] if lone else [],
        bars=[(x(a), y(lo), y(hi)) for (a, _), (lo, hi) in zip(line.points, line.errors, strict=bool(line.errors))],
        first=show(smoothed[0][1]),
        last=show(smoothed[-1][1]),
    )


def smoothing_window(points: int) -> int:
    """Return how many logged steps the moving average of a series of ``points`` values covers, an odd number; 1 means
    no smoothing."""
    if points >= SMOOTH_FROM:
        return 2 * max(1, round(points / 40)) + 1
    return 1


def smooth(points: Points) -> list[tuple[float, float]]:
    """Compute the moving average of the points. Its window is centred, so that a bend stays at its step, and shorter
    near the ends."""
    reach = smoothing_window(len(points)) // 2
    sums = [0.0, *accumulate(y for _, y in points)]
    averaged = []
    for place, (x, _) in enumerate(points):
        start = max(0, place - reach)
        end = min(len(points), place + reach + 1)
        averaged.append((x, (sums[end] - sums[start]) / (end - start)))
    return averaged


def envelope(points: Points) -> list[tuple[float, float]]:
    """Thin the points out to about ``_MOST_POINTS`` without losing a peak, by keeping the lowest and the highest of
    each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return every n-th point, so that about ``_MOST_POINTS`` remain, and the last one."""
    every = math.ceil(len(points) / _MOST_POINTS)
    return [*points[:-1:every], points[-1]]


def nice_ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Return round numbers that cover [low, high]: multiples of 1, 2, 2.5 or 5 × 10^m with about ``about`` gaps.

    ``whole``: they are at least 1 apart. If the range is empty or not finite, ``low`` is the only tick.
    """
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / about))
    gap = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m * about >= span * 0.999)
    if whole:
        gap = max(1.0, float(math.ceil(gap)))
    start = math.floor(low / gap + 1e-9)
    end = math.ceil(high / gap - 1e-9)
    return [gap * i for i in range(start, end + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear function that maps [low, high] to the pixels [start, end], rounded to a tenth."""
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def _path(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return the points as an SVG path."""
    return "M" + "L".join(f"{x(a):g} {y(b):g}" for a, b in points)


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _plain(value: float) -> str:
    """Format a number in few characters: `0.123`, `1234`, `12.3k`, `1.2e-5`."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 10_000:
        return f"{value / 1000:.4g}k"
    if size >= 1000:
        return f"{value:.4g}"
    return f"{value:.3g}"
