"""``tests/stress/soak.py``: its slope by hand, a planted leak, and a short run whose descriptors and processes stay."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import soak
from scipy import stats


def test_the_slope_by_hand() -> None:
    # three blocks of two: steps 500, 1500, 2500 on average, values 1, 3, 2; in thousands x = 0.5, 1.5, 2.5
    # slope = Σ(x − 1.5)(y − 2) / Σ(x − 1.5)² = ((−1)(−1) + 0 + 1·0) / 2 = 0.5; residuals −0.5, 1, −0.5: SSE 1.5
    # standard error = sqrt(1.5 / (3 − 2) / 2) = 0.866; t(0.975, 1) = 12.706: ± 11.004
    found = soak.slope_of([400, 600, 1400, 1600, 2400, 2600], [0.0, 2.0, 4.0, 2.0, 1.0, 3.0], blocks=3)
    assert (found.first, found.last) == (1.0, 2.0)
    assert found.slope == pytest.approx(0.5, rel=1e-12)
    assert found.low == pytest.approx(0.5 - 11.0039, rel=1e-4)
    assert found.high == pytest.approx(0.5 + 11.0039, rel=1e-4)


def test_blocks_that_remember_count_as_fewer() -> None:
    values = [float(v) for v in (0, 0, 3, 3, 0, 0, 3, 3) for _ in range(2)]
    steps = [1000 * i + at for i in range(8) for at in (400, 600)]
    # x̄ = 4, Σ(x − 4)² = 42, Σ(x − 4)·y = 3·(−1.5 − 0.5 + 2.5 + 3.5) = 12: slope 2/7; SST = 18, SSE = 18 − 144/42 =
    # 14.5714 residuals × 14: −7, −11, 27, 23, −23, −27, 11, 7; squares sum 2856; products of neighbours: 77 − 297 + 621
    # − 529 + 621 − 297 + 77 = 273 r = 273/2856 = 0.0955882: 0.9044118 / 1.0955882 = 0.8255034 of 8 blocks error =
    # sqrt(14.5714286 / 6 / 42) = 0.2404643, / sqrt(0.8255034) = 0.2646615
    found = soak.slope_of(steps, values, blocks=8)
    assert found.slope == pytest.approx(2 / 7, rel=1e-12)
    freedom = 8 * 0.8255034 - 2
    assert found.high - found.slope == pytest.approx(float(stats.t.ppf(0.975, freedom)) * 0.2646615, rel=1e-5)


def test_what_wanders_is_not_called_growing() -> None:
    """200 random walks without a trend: 28% lie beyond 0 (± 3.2% in 200), 45% at most; with blocks taken as independent
    70%."""
    draw, beyond = random.Random(0), 0
    for _ in range(200):
        values = list(itertools.accumulate(draw.gauss(0, 1) for _ in range(320)))
        found = soak.slope_of(list(range(0, 1600, 5)), values)
        beyond += not found.low <= 0.0 <= found.high
    assert beyond <= 90


def test_an_interval_that_allows_more_than_the_limit_proves_nothing() -> None:
    assert soak.Slope(0, 0, 4.0, -4.0, 12.0).flat(10.0) is None
    assert soak.Slope(0, 0, 11.0, 4.0, 18.0).flat(10.0) is False
    assert soak.Slope(0, 0, 5.0, 2.0, 8.0).flat(10.0) is True


def test_a_column_that_never_moves_is_flat() -> None:
    found = soak.slope_of(list(range(40)), [8.0] * 40, blocks=20)
    assert (found.first, found.slope, found.low, found.high) == (8.0, 0.0, 0.0, 0.0)
    assert found.flat(0.1)


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="39 samples after the warm-up are too few for 20 blocks"):
        soak.slope_of(list(range(39)), [0.0] * 39)


@pytest.mark.parametrize(("leak", "flat"), [(0.0, True), (0.05, False)])
def test_a_planted_leak_is_seen_through_noise(leak: float, flat: bool) -> None:
    """0.05 MiB a step: 50 in 1,000 steps, in noise of ± 5 that wanders (each sample holds 0.9 of the one before)."""
    draw, wander, rows = random.Random(0), 0.0, []
    for step in range(5, 2001, 5):
        wander = 0.9 * wander + draw.uniform(-1, 1)
        rows.append({"step": step, "rss": 500 + wander + leak * step + (300 if step < 100 else 0)})
    found = soak.slopes(rows)["rss"]
    assert found.flat(soak.COLUMNS["rss"][1]) is flat
    if not flat:
        assert found.low < 50 < found.high


@pytest.mark.thorough
@pytest.mark.slow
def test_a_short_run_holds_what_it_holds(tmp_path: Path) -> None:
    rows = soak.soaked("transformers", 60, 1, tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["processes"] > 1  # the pool of verifiers was at work
    found = soak.slopes(rows)
    for name in ("descriptors", "processes", "threads"):
        spread = {row[name] for row in rows if row["step"] > 12}
        assert len(spread) == 1 or found[name].flat(soak.COLUMNS[name][1]), (name, sorted(spread))
    assert rows[-1]["rss"] - rows[29]["rss"] < 50  # MiB; a step that keeps its batch or graph holds more
