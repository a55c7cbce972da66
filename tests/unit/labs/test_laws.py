"""Gao's law of over-optimisation and the entropy law: by hand, on planted coefficients, and where they cannot say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_lab.diagnostics.laws import entropy_law, overoptimisation_law

E = math.e


def test_best_of_n_by_hand() -> None:
    """d = 1, 2, 3 with R = 3, 4, 4. Columns d and −d²: XᵀX = [[14, −36], [−36, 98]], det = 1372 − 1296 = 76;
    Xᵀy = [3 + 8 + 12, −3 − 16 − 36] = [23, −55]. α = (98·23 − 36·55)/76 = 274/76, β = (36·23 − 14·55)/76 = 58/76.
    Fitted: α − β = 216/76, 2α − 4β = 316/76, 3α − 9β = 300/76; residuals 12/76, −12/76, 4/76; s² = 304/76² / 1."""
    law = overoptimisation_law([(1, 3), (2, 4), (3, 4)], best_of_n=True)
    assert (law.alpha, law.beta) == pytest.approx((274 / 76, 58 / 76), rel=1e-12)
    s = math.sqrt(304) / 76
    assert law.fit.residual == pytest.approx(s, rel=1e-11)
    assert law.fit.errors == pytest.approx((s * math.sqrt(98 / 76), s * math.sqrt(14 / 76)), rel=1e-11)
    # at d = 1: xᵀ(XᵀX)⁻¹x with x = (1, −1) = (98 − 2·36 + 14)/76 = 40/76
    there = law.at(1.0)
    assert there.value == pytest.approx(216 / 76, rel=1e-12)
    assert there.error == pytest.approx(s * math.sqrt(40 / 76), rel=1e-11)
    assert there.error_of_point == pytest.approx(s * math.sqrt(116 / 76), rel=1e-11)
    # d* = α/(2β) = 274/116, R = α²/(4β) = 274²/(4·58·76)
    assert law.peak == pytest.approx((274 / 116, 274**2 / (4 * 58 * 76)), rel=1e-11)


def test_rl_by_hand() -> None:
    """d = 1, e, e² with R = 2, e, −e². d·(α − β·log d) is α, e·(α − β), e²·(α − 2β): α = 2, α − β = 1 and, off by a
    point, α − 2β = −1 instead of 0. The columns are (1, 0), (e, −e), (e², −2e²)."""
    law = overoptimisation_law([(1, 2), (E, E), (E**2, 0)])
    assert (law.alpha, law.beta, law.fit.residual) == pytest.approx((2, 1, 0), abs=1e-12)
    assert law.peak == pytest.approx((E, E), rel=1e-12)  # d* = exp(2/1 − 1) = e, R = β·d* = e
    off = overoptimisation_law([(1, 2), (E, E), (E**2, -(E**2))])
    a, b, c = 1 + E**2 + E**4, -(E**2) - 2 * E**4, E**2 + 4 * E**4  # XᵀX = [[a, b], [b, c]]
    y1, y2 = 2 + E**2 - E**4, -(E**2) + 2 * E**4
    det = a * c - b * b
    assert (off.alpha, off.beta) == pytest.approx(((c * y1 - b * y2) / det, (a * y2 - b * y1) / det), rel=1e-11)


def test_the_start_is_a_point_that_says_nothing() -> None:
    points = [(0.5, 0.4), (1.0, 0.7), (2.0, 0.6)]
    law, with_start = overoptimisation_law(points), overoptimisation_law([(0.0, 0.0), *points])
    assert (with_start.alpha, with_start.beta) == pytest.approx((law.alpha, law.beta), rel=1e-12)
    assert (with_start.at(0.0).value, with_start.at(0.0).error) == (0.0, 0.0)


@pytest.mark.parametrize("best_of_n", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1.2, 0.4), (0.05, 0.9), (0.3, -0.2), (-0.5, 0.25), (0.8, 0.0)])
def test_planted_coefficients_come_back(alpha: float, beta: float, best_of_n: bool) -> None:
    places = np.linspace(0.05, 6.0, 40)
    points = [(d, d * (alpha - beta * (d if best_of_n else math.log(d)))) for d in places]
    law = overoptimisation_law(points, best_of_n=best_of_n)
    assert (law.alpha, law.beta) == pytest.approx((alpha, beta), abs=1e-12)
    assert law.at(9.0).value == pytest.approx(9 * (alpha - beta * (9 if best_of_n else math.log(9))), abs=1e-10)
    if (peak := law.peak) is not None and beta > 1e-6:
        there, reward = peak
        assert law.at(there).value == pytest.approx(reward, rel=1e-9)
        assert max(law.at(there * 0.99).value, law.at(there * 1.01).value) < reward


def test_no_peak_where_it_only_rises_or_only_falls() -> None:
    rising = [(d, 2 * d + 0.5 * d * math.log(d)) for d in (0.5, 1.0, 2.0, 4.0)]  # α = 2, β = −0.5
    assert overoptimisation_law(rising).peak is None
    falling = [(d, -d - d * d) for d in (0.5, 1.0, 2.0, 4.0)]  # α = −1, β = 1
    assert overoptimisation_law(falling, best_of_n=True).peak is None
    nearly_straight = [(d, d * (1 - 1e-4 * math.log(d))) for d in (0.5, 1.0, 2.0, 4.0)]
    assert overoptimisation_law(nearly_straight).peak is None  # exp(10⁴ − 1) is no number


def test_errors_cover_as_often_as_they_say() -> None:
    """Over 400 runs of 30 points with noise: a coefficient lies within 2.048 standard errors (t, 28 degrees of freedom,
    95%) in 95% of them; a new point likewise. 400 draws of 0.95: standard deviation 1.1 points, so ±4 of them."""
    draw, places = np.random.default_rng(0), np.linspace(0.2, 5.0, 30)
    true = places * (0.9 - 0.35 * np.log(places))
    inside = np.zeros(3)
    for _ in range(400):
        law = overoptimisation_law([*zip(places, true + draw.normal(0, 0.1, 30), strict=True)])
        off = np.abs([law.alpha - 0.9, law.beta - 0.35]) / np.array(law.fit.errors)
        told = law.at(7.0)
        new = 7 * (0.9 - 0.35 * math.log(7)) + draw.normal(0, 0.1)
        inside += np.array([*(off < 2.048), abs(told.value - new) < 2.048 * told.error_of_point])
    assert (np.abs(inside / 400 - 0.95) < 0.044).all(), inside


def test_entropy_by_hand() -> None:
    """e^H = 1, 2, 3 with R = 5, 4, 2: the line R = b − a·e^H through them. Means 2 and 11/3; slope −a =
    ((−1)(4/3) + 0 + (1)(−5/3))/2 = −3/2; b = 11/3 + 3/2·2 = 20/3. Residuals −1/6, 1/3, −1/6: s² = 1/6."""
    law = entropy_law([(math.log(n), reward) for n, reward in ((1, 5), (2, 4), (3, 2))], share=1)
    assert (law.a, law.b) == pytest.approx((3 / 2, 20 / 3), rel=1e-12)
    assert law.fit.residual == pytest.approx(math.sqrt(1 / 6), rel=1e-11)
    # of a line: error of the mean at x: s·√(1/n + (x − 2)²/2). At H = 0, x = 1: √(1/3 + 1/2)
    ceiling = law.at(0.0)
    assert ceiling.value == pytest.approx(20 / 3 - 3 / 2, rel=1e-12)  # b − a
    assert ceiling.error == pytest.approx(math.sqrt(1 / 6 * 5 / 6), rel=1e-11)
    assert ceiling.error_of_point == pytest.approx(math.sqrt(1 / 6 * 11 / 6), rel=1e-11)


def test_the_first_third_is_fitted_and_predicts_the_end() -> None:
    entropies = [2.0 - 0.18 * step for step in range(10)]
    run = [(h, 0.9 - 0.1 * math.exp(h)) for h in entropies]
    law = entropy_law(run)
    assert law.fit.n == 4  # ⌈10/3⌉
    assert entropy_law(run[:9]).fit.n == 3  # 9·(1/3) is 3, not ⌈3.0000…⌉ = 4
    assert (law.a, law.b) == pytest.approx((0.1, 0.9), rel=1e-10)
    assert law.at(entropies[-1]).value == pytest.approx(run[-1][1], rel=1e-10)
    spoiled = [*run[:4], *((h, 7.0) for h, _ in run[4:])]
    assert entropy_law(spoiled).a == law.a  # the rest of the run is not read


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([(1.0, 0.1), (2.0, 0.2)], "need 3 points .* got 2"),
        ([(1.5, 0.1), (1.5, 0.2), (1.5, 0.3)], "between 1.5 and 1.5 in all 3 points"),
        ([(0.0, 0.0), (0.0, 0.1), (2.0, 0.3)], "does not tell two coefficients apart"),
        ([(0.0, 0.0), (0.0, 0.1), (0.0, 0.3)], "does not tell two coefficients apart"),
        ([(1.0, 0.1), (2.0, math.nan), (3.0, 0.2)], r"one is \(2.0, nan\)"),
        ([(1.0, 0.1), (math.inf, 0.2), (3.0, 0.2)], "one is"),
        ([(1.0, 0.1), (-0.5, 0.2), (3.0, 0.2)], "a distance √KL is -0.5"),
    ],
)
def test_what_cannot_be_fitted_is_said(points: list[tuple[float, float]], said: str) -> None:
    for best_of_n in (False, True):
        with pytest.raises(ValueError, match=said):
            overoptimisation_law(points, best_of_n=best_of_n)


def test_what_the_entropy_law_refuses() -> None:
    with pytest.raises(ValueError, match=r"need 3 points \(of entropy"):
        entropy_law([(1.0, 0.1), (0.9, 0.2), (0.8, 0.3), (0.7, 0.4)])  # ⌈4/3⌉ = 2
    with pytest.raises(ValueError, match="entropy is between 1 and 1"):
        entropy_law([(1.0, 0.1 * n) for n in range(9)])
    with pytest.raises(ValueError, match=r"lies in \(0, 1\]"):
        entropy_law([(1.0, 0.1)] * 9, share=0)
    with pytest.raises(ValueError, match="a distance √KL is -1"):
        overoptimisation_law([(0.5, 0.4), (1.0, 0.7), (2.0, 0.6)]).at(-1.0)
