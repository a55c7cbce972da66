"""The laws of over-optimisation and of entropy: fits by hand, planted coefficients, errors that say what they claim."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo_lab.diagnostics.laws import (
    best_of_n_kl,
    best_of_n_over_optimisation,
    entropy_law,
    forecast,
    over_optimisation,
)

FORMULAS: list[tuple[Callable[[Any], Any], Callable[[float, float, float], float]]] = [
    (over_optimisation, lambda d, alpha, beta: d * (alpha - beta * math.log(d))),
    (best_of_n_over_optimisation, lambda d, alpha, beta: d * (alpha - beta * d)),
    (entropy_law, lambda entropy, a, b: -a * math.exp(entropy) + b),
]
"""Written here once more, from the papers."""
PLACES = (0.1, 0.3, 0.5, 1.0, 1.7, 2.5, 4.0)


def exactly(value: float) -> Any:
    """Some roundings of float64 through a fit of two coefficients."""
    return pytest.approx(value, rel=1e-10, abs=1e-10)


def test_best_of_n_by_hand() -> None:
    """X = (1, −1), (2, −4), (1, −1), y = 1, 0, 3. XᵀX = (6 −10; −10 18), its inverse (18 10; 10 6)/8, Xᵀy = (4, −4):
    α = (72 − 40)/8 = 4, β = (40 − 24)/8 = 2. Residuals −1, 0, 1: s² = 2/(3 − 2), covariance (4.5 2.5; 2.5 1.5)."""
    law = best_of_n_over_optimisation([(1.0, 1.0), (2.0, 0.0), (1.0, 3.0)])
    assert law.coefficients == (exactly(4), exactly(2))
    assert law.errors == (exactly(math.sqrt(4.5)), exactly(math.sqrt(1.5)))
    assert (law.scatter, law.points, law.peak) == (exactly(math.sqrt(2)), 3, exactly(1))  # 4/(2·2)
    # at 1: 4 − 2; its variance 4.5 − 2·2.5 + 1.5 = 1, that of a point 1 + 2, of a mean of two 1 + 2/2
    assert law.at(1.0) == (exactly(2), exactly(1), exactly(math.sqrt(3)))
    assert law.at(1.0, 2).error_of_point == exactly(math.sqrt(2))


def test_the_entropy_law_by_hand() -> None:
    """exp(H) = 1, 1, 2 and R = 3, 5, 1: a line through (1, 4) and (2, 1), so a = 3, b = 7. Residuals −1, 1, 0: s² = 2;
    XᵀX = (6 −4; −4 3), inverse (3 4; 4 6)/2, covariance (3 4; 4 6). At H = 0: b − a = 4, variance 3 − 8 + 6 = 1."""
    law = entropy_law([(0.0, 3.0), (0.0, 5.0), (math.log(2), 1.0)])
    assert law.coefficients == (exactly(3), exactly(7))
    assert law.errors == (exactly(math.sqrt(3)), exactly(math.sqrt(6)))
    assert law.ceiling == (exactly(4), exactly(1), exactly(math.sqrt(3)))


def test_the_rl_law_by_hand() -> None:
    """α = 1, β = ½: R(1) = 1, R(e) = e·½, R(e²) = 0. The peak is at exp(1/½ − 1) = e and is β·e."""
    law = over_optimisation([(1.0, 1.0), (math.e, math.e / 2), (math.e**2, 0.0), (0.0, 0.0)])
    assert law.coefficients == (exactly(1), exactly(0.5))
    assert law.points == 3  # at d = 0 every law says 0
    assert (law.peak, law(math.e), law(0.0)) == (exactly(math.e), exactly(math.e / 2), 0.0)
    assert law.scatter < 1e-12


@pytest.mark.parametrize(("fit", "formula"), FORMULAS)
def test_planted_coefficients_come_back_in_any_order_and_unit(fit: Any, formula: Any) -> None:
    for first, second in ((0.8, 0.3), (-0.5, 2.0), (1e-4, 3e4), (2.0, -0.1)):
        points = [(x, formula(x, first, second)) for x in PLACES]
        assert fit(points).coefficients == (exactly(first), pytest.approx(second, rel=1e-9))
        assert fit(points)(1.3) == pytest.approx(formula(1.3, first, second), rel=1e-9)
    noisy = [(x, formula(x, 0.8, 0.3) + 0.1 * math.sin(9 * x)) for x in PLACES]
    law, other = fit(noisy), fit([(x, 100 * r) for x, r in reversed(noisy)])
    assert np.allclose(np.array(other.coefficients), 100 * np.array(law.coefficients), rtol=1e-10)
    assert np.allclose(np.array(other.errors), 100 * np.array(law.errors), rtol=1e-10)


@pytest.mark.parametrize(("fit", "formula"), FORMULAS)
def test_no_neighbouring_coefficients_fit_better(fit: Any, formula: Any) -> None:
    points = [(x, formula(x, 0.8, 0.3) + 0.1 * math.sin(9 * x)) for x in PLACES]

    def loss(first: float, second: float) -> float:
        return sum((r - formula(x, first, second)) ** 2 for x, r in points)

    first, second = fit(points).coefficients
    best = loss(first, second)
    assert fit(points).scatter ** 2 == exactly(best / (len(points) - 2))
    for moved in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3), (1e-3, 1e-3), (-1e-3, 1e-3)):
        assert loss(first + moved[0], second + moved[1]) > best


@pytest.mark.parametrize(("fit", "formula"), FORMULAS)
def test_errors_hold_the_truth_as_often_as_they_say(fit: Any, formula: Any) -> None:
    """400 fits of 20 points with independent normal errors; ±2.101 standard errors (t, 18 degrees of freedom) hold the
    truth in 95%: five binomial standard deviations are 22 of 400."""
    draw, places, n = random.Random(0), [0.2 + 0.15 * i for i in range(20)], 400
    held = {"first": 0, "second": 0, "law": 0, "point": 0}
    for _ in range(n):
        law = fit([(x, formula(x, 0.8, 0.3) + draw.gauss(0, 0.2)) for x in places])
        at, truth = law.at(3.5), formula(3.5, 0.8, 0.3)
        held["first"] += abs(law.coefficients[0] - 0.8) <= 2.101 * law.errors[0]
        held["second"] += abs(law.coefficients[1] - 0.3) <= 2.101 * law.errors[1]
        held["law"] += abs(at.value - truth) <= 2.101 * at.error
        held["point"] += abs(at.value - truth - draw.gauss(0, 0.2)) <= 2.101 * at.error_of_point
    assert all(abs(count - 0.95 * n) <= 5 * math.sqrt(n * 0.95 * 0.05) for count in held.values()), held


def test_where_the_gain_is_highest() -> None:
    """Of a fine grid; none where more is always better; at the start where it only falls."""
    grid = [i / 1000 for i in range(1, 20_000)]
    for alpha, beta in ((1.0, 0.6), (-0.4, 0.3), (0.2, 2.0)):
        for fit, formula in FORMULAS[:2]:
            peak = fit([(d, formula(d, alpha, beta)) for d in PLACES]).peak
            best = max([0.0, *grid], key=lambda d: formula(d, alpha, beta) if d else 0.0)
            assert peak == pytest.approx(best, abs=1.01e-3)
            assert fit([(d, formula(d, alpha, -beta)) for d in PLACES]).peak is None
    flat = over_optimisation([(d, d * (1 - 1e-6 * math.log(d))) for d in PLACES]).peak
    assert flat is not None
    assert flat > 1e300  # exp(10⁶) is beyond float64


def test_the_kl_of_the_best_of_n() -> None:
    """log 2 − ½ by hand. The best of n of a uniform score u has the density n·u^(n−1) against 1; the midpoint rule."""
    assert best_of_n_kl(1) == 0
    assert best_of_n_kl(2) == exactly(math.log(2) - 0.5)
    u = (np.arange(200_000) + 0.5) / 200_000
    for n in (2, 5, 40):
        density = n * u ** (n - 1)
        assert best_of_n_kl(n) == pytest.approx(float((density * np.log(density)).mean()), abs=1e-5)
    with pytest.raises(ValueError, match="n is 0: best of at least 1"):
        best_of_n_kl(0)


def test_the_first_third_predicts_the_end() -> None:
    """Entropy falls from 1 to 0.1 over 60 steps and R follows exactly: the end is predicted to rounding, and what is
    left to reach is b − a = 0.9 − 0.3. With another law after the first third it is not."""
    entropies = [1.0 - 0.9 * i / 59 for i in range(60)]
    run = [(h, -0.3 * math.exp(h) + 0.9) for h in entropies]
    found = forecast(run)
    assert found.law.points == 20
    assert found.predicted.value == exactly(found.measured)
    assert found.entropy == exactly(math.log(sum(math.exp(h) for h in entropies[-6:]) / 6))
    assert found.ceiling.value == exactly(0.6)
    broken = forecast([*run[:30], *((h, reward + 0.2) for h, reward in run[30:])])
    assert broken.measured - broken.predicted.value == exactly(0.2)


def test_what_cannot_be_fitted_is_refused() -> None:
    refused: list[tuple[Callable[[Any], Any], Any, str]] = [
        (over_optimisation, [(1.0, 0.1), (2.0, 0.1), (0.0, 0.0)], r"^2 points \(d, R\) .* at least 3"),
        (over_optimisation, [(1.5, 0.1)] * 9, r"no spread: d lies between 1.5 and 1.5, .* two different d"),
        (over_optimisation, [(-0.1, 0.1), (1.0, 0.1), (2.0, 0.1)], r"d is -0.1: √KL is not negative"),
        (best_of_n_over_optimisation, [(2.0, 0.1)] * 3, "no spread"),
        (entropy_law, [(0.3, 0.1), (0.3, 0.2), (0.3, 0.3)], r"no spread: H lies between 0.3 and 0.3"),
        (entropy_law, [(0.3, 0.1), (math.nan, 0.2), (0.4, 0.3)], r"a point \(H, R\) is \(nan, 0.2\)"),
        (entropy_law, [(0.3, 0.1), (0.5, 0.2)], r"^2 points \(H, R\)"),
        (forecast, [(0.3 + i, 0.1) for i in range(6)], r"^2 points \(H, R\)"),
        (lambda run: forecast(run, 0.9, 0.2), [(0.3, 0.1)], "`first` is 0.9 and `last` 0.2"),
    ]
    for fit, points, why in refused:
        with pytest.raises(ValueError, match=why):
            fit(points)
