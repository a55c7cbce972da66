"""Calibration against values worked out by hand on made predictions."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_lab.evaluation.calibration import agreement, calibrated, ece, equal_mass, equal_width, reliability

# four answers at 0.9, three of them right; two at 0.35, none right; four at 0.6, two right
MADE = [(0.9, 1.0), (0.9, 1.0), (0.9, 1.0), (0.9, 0.0), (0.35, 0.0), (0.35, 0.0)]
MADE += [(0.6, 1.0), (0.6, 1.0), (0.6, 0.0), (0.6, 0.0)]


def test_ece_and_brier_by_hand() -> None:
    found = calibrated(MADE, draws=200)
    # |0.75 − 0.9| · 4/10 + |0 − 0.35| · 2/10 + |0.5 − 0.6| · 4/10
    assert found.ece.value == pytest.approx(0.06 + 0.07 + 0.04)
    # 3 · 0.1² + 0.9² + 2 · 0.35² + 2 · 0.4² + 2 · 0.6², over 10
    assert found.brier.value == pytest.approx((0.03 + 0.81 + 0.245 + 0.32 + 0.72) / 10)
    assert [(one.confidence, one.correct, one.n) for one in found.bins] == [
        pytest.approx((0.35, 0.0, 2)), pytest.approx((0.6, 0.5, 4)), pytest.approx((0.9, 0.75, 4))
    ]  # fmt: skip
    assert found.ece.low <= found.ece.value <= found.ece.high <= 1


def test_bins_of_equal_width_and_of_equal_mass_by_hand() -> None:
    sure = np.array([0.0, 0.1, 0.11, 0.7, 0.70001, 1.0])
    assert equal_width(sure).tolist() == [0, 0, 1, 6, 7, 9]
    # four answers in two bins; equal confidences stay together
    assert equal_mass(np.array([0.2, 0.9, 0.3, 0.8]), 2).tolist() == [0, 1, 0, 1]
    assert equal_mass(np.array([0.5, 0.5, 0.5, 0.8]), 2).tolist() == [0, 0, 0, 1]
    # by width all four are in one bin and their errors cancel; by mass they show: 2/4 · 0.45 + 2/4 · 0.45
    sure, right = np.array([0.51, 0.55, 0.55, 0.59]), np.array([0.0, 0.0, 1.0, 1.0])
    right = np.array([0.1, 0.1, 1.0, 1.0])
    assert ece(sure, right, equal_width(sure)) == pytest.approx(0.0)
    of_mass = equal_mass(np.array([0.51, 0.52, 0.58, 0.59]), 2)
    assert ece(sure, right, of_mass) == pytest.approx((0.43 + 0.43) / 2)
    assert [one.n for one in reliability(sure, right, of_mass)] == [2, 2]


def test_a_calibrated_model_and_an_overconfident_one() -> None:
    draw = np.random.default_rng(1)
    sure = draw.uniform(size=4000)
    right = (draw.uniform(size=4000) < sure).astype(float)
    honest = calibrated([*zip(sure.tolist(), right.tolist(), strict=True)], draws=100)
    assert max(honest.ece.value, honest.ece_equal_mass.value) < 0.03
    assert honest.brier.value == pytest.approx(1 / 6, abs=0.01)  # ∫ p(1 − p) dp
    boast = calibrated([(1.0, float(one)) for one in right], draws=100)
    assert boast.ece.value == pytest.approx(1 - right.mean())
    assert boast.ece.low > 0.45
    assert boast.ece_equal_mass.value == boast.ece.value


@pytest.mark.not_fast
def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Brier of a coin that is said to be 0.8 and is: 0.16; 200 draws of 100 answers each."""
    draw, inside = np.random.default_rng(0), 0
    for seed in range(200):
        right = (draw.uniform(size=100) < 0.8).astype(float)
        found = calibrated([(0.8, float(one)) for one in right], draws=200, seed=seed).brier
        inside += found.low <= 0.16 <= found.high
    assert 0.90 <= inside / 200 <= 0.99


def test_agreement_by_hand() -> None:
    votes = [
        [("4", True), ("4", True), ("5", False), (None, False)],  # 4 by 2 of 4
        [("1", False), ("2", True)],  # a tie: right half of the time
        [(None, False), (None, False)],
    ]
    assert agreement(votes) == [(0.5, 1.0), (0.5, 0.5), (0.0, 0.0)]


@pytest.mark.parametrize("pairs", [[], [(1.2, 0.0)], [(0.5, float("nan"))]])
def test_what_is_no_prediction_is_refused(pairs: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\], got (none|\[\[)"):
        calibrated(pairs)
