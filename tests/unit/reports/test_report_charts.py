"""Ticks, smoothing and thinning of the report's charts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.evaluation.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    draw,
    envelope,
    nice_ticks,
    smooth,
    thinned,
)

finite = st.floats(-1e12, 1e12, allow_nan=False)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 0.009, [0, 0.0025, 0.005, 0.0075, 0.01]),
        (57, 92, [50, 60, 70, 80, 90, 100]),
        (-0.03, 0.02, [-0.04, -0.02, 0, 0.02]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert nice_ticks(low, high, 4) == pytest.approx(ticks)


def test_steps_are_whole():
    assert nice_ticks(0, 3, 6, whole=True) == [0, 1, 2, 3]


@given(finite, st.floats(1e-9, 1e12))
def test_ticks_cover_the_range_with_few_lines(low, span):
    high = low + span
    if high <= low:
        return
    ticks = nice_ticks(low, high, 4)
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= high - 1e-6 * span
    assert 1 < len(ticks) <= 8


def test_smoothing_keeps_a_constant_and_follows_a_line_without_lag():
    assert [y for _, y in smooth([(x, 3.0) for x in range(100)])] == pytest.approx([3.0] * 100)
    line = smooth([(x, 2.0 * x) for x in range(100)])
    assert line[50] == (50, pytest.approx(100.0))


def test_smoothing_by_hand():
    """40 points: window 3. The second is the mean of the first three, the first that of the first two."""
    points = [(x, float(x * x)) for x in range(40)]
    assert smooth(points)[1][1] == pytest.approx((0 + 1 + 4) / 3)
    assert smooth(points)[0][1] == pytest.approx((0 + 1) / 2)


def test_short_series_are_not_smoothed():
    points = [(x, float((-1) ** x)) for x in range(10)]
    assert smooth(points) == points


@given(st.lists(finite, min_size=1, max_size=3000))
def test_thinning_keeps_extremes_and_ends(values):
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = envelope(points)
    assert len(kept) <= 602
    assert {min(values), max(values)} <= {y for _, y in kept}
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert thinned(points)[-1] == points[-1]
    assert len(thinned(points)) <= 301


@given(st.lists(st.lists(finite, min_size=0, max_size=60), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_everything_is_inside_the_box(series, share, from_zero):
    lines = [Line(f"s{i}", [(float(x), y) for x, y in enumerate(values)]) for i, values in enumerate(series)]
    if not any(series):
        return
    chart = draw(lines, unit="u", share=share, from_zero=from_zero)
    assert len(chart.lines) == sum(bool(values) for values in series)
    for line in chart.lines:
        numbers = [float(n) for n in line.smooth[1:].replace("L", " ").split()]
        assert all(math.isfinite(n) for n in numbers)
        assert all(LEFT - 1 <= n <= WIDTH - RIGHT + 1 for n in numbers[::2])
        assert all(TOP - 1 <= n <= HEIGHT - BOTTOM + 1 for n in numbers[1::2])


def test_a_small_share_is_magnified_and_a_large_one_gets_the_whole_scale():
    small = draw([Line("s", [(1, 0.001), (2, 0.004)])], unit="u", share=True)
    large = draw([Line("s", [(1, 0.2), (2, 0.7)])], unit="u", share=True)
    assert [tick.text for tick in small.y_ticks] == ["0%", "0.25%", "0.5%", "0.75%", "1%"]
    assert [tick.text for tick in large.y_ticks] == ["0%", "25%", "50%", "75%", "100%"]


def test_a_second_axis_has_its_own_scale_and_room():
    """Shares up to 1 at the left, lengths up to 30 at the right: both tops are the top of the box, both zeros its
    bottom."""
    shares, lengths = Line("right", [(0, 0.0), (10, 1.0)]), Line("tokens", [(0, 0.0), (10, 30.0)])
    chart = draw([shares], unit="share", share=True, right=[lengths], right_unit="tokens")
    assert [line.label for line in chart.lines] == ["right", "tokens"]
    assert chart.lines[0].smooth == chart.lines[1].smooth
    assert (chart.lines[0].last, chart.lines[1].last) == ("100%", "30")
    assert [tick.text for tick in chart.right_ticks] == ["0", "10", "20", "30"]
    assert (chart.right_ticks[0].at, chart.right_ticks[-1].at) == (HEIGHT - BOTTOM, TOP)
    assert chart.box["right"] < WIDTH - RIGHT
    plain = draw([shares], unit="share", share=True)
    assert (plain.right_ticks, plain.right_unit, plain.box["right"]) == ([], "", WIDTH - RIGHT)
