"""Laws to compare a run with: reward against the distance to the start, and reward against entropy. Pure: numbers only.

    over-optimisation, RL          R(d) − R(0) = d·(α − β·log d)       d = √KL(π‖π_start), KL in nats a completion
    over-optimisation, best of n   R(d) − R(0) = d·(α − β·d)           KL = log n − (n − 1)/n
    entropy                        R(H) = −a·e^H + b                   H in nats a token; at H = 0 it is b − a

Each is linear in its two coefficients θ: least squares has a closed form, θ = (XᵀX)⁻¹Xᵀy, s² = |y − Xθ|²/(n − 2),
cov θ = s²·(XᵀX)⁻¹, in float64. The errors are those of independent points. Steps of one run are not independent, since
neighbours share a model: errors from one run come out too small. Errors over seeds do not.

Sources: Gao, Schulman, Hilton, arXiv 2210.10760, section 3.1 (α, β of the gold reward); Cui et al., arXiv 2505.22617,
section 2.4: fitted on the first part of a run that does not hold its entropy up, it predicts the rest (how large a part
is ours).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = Sequence[tuple[float, float]]
"""Pairs (x, reward), where x is the quantity that the law is a function of."""
Columns = tuple[float, float]
"""One number for each of a law's two coefficients: the row of X at one point, or the errors of both."""
FEWEST = 3
"""Least number of points: two coefficients take two, and a third shows how far off they are."""
COLLINEAR = 1e-9
"""Smallest sine of the angle between the law's two columns at which its two coefficients can be told apart."""


@dataclass(frozen=True)
class Prediction:
    """A law's value at one place, with the standard error of the mean there, and that of one new point."""

    value: float
    error: float
    error_of_point: float


@dataclass(frozen=True)
class Fitted:
    """Two coefficients fitted by least squares, with the names of the module's formulas.

    Args:
        theta: θ, the coefficients ``[2]``.
        inverse: (XᵀX)⁻¹ ``[2, 2]``.
        residual: s, the standard deviation of the residuals, in units of the reward.
        n: number of points that were fitted.
    """

    theta: NDArray[np.float64]
    inverse: NDArray[np.float64]
    residual: float
    n: int

    @property
    def errors(self) -> Columns:
        """Standard errors of the coefficients."""
        first, second = self.residual * np.sqrt(np.diag(self.inverse))
        return float(first), float(second)

    def at(self, columns: Columns) -> Prediction:
        """Predict the law's value where the row of X is ``columns``, x: Σ θ·x, its standard error s·√v with v =
        xᵀ(XᵀX)⁻¹x, and that of a new point measured there, s·√(1 + v)."""
        x = np.array(columns, dtype=np.float64)
        value = float(x @ self.theta)
        variance = max(float(x @ self.inverse @ x), 0.0)
        return Prediction(value, self.residual * math.sqrt(variance), self.residual * math.sqrt(1 + variance))


def least_squares(points: Points, columns: Callable[[float], Columns], over: str) -> Fitted:
    """Fit the two coefficients of a law to points (x, reward) by least squares.

    Args:
        points: at least three.
        columns: returns the row of X that belongs to an x.
        over: the name of x, for error messages.

    Raises:
        ValueError: there are fewer points, one is NaN or infinite, or they do not tell the two coefficients apart.
    """
    if len(points) < FEWEST:
        raise ValueError(
            f"two coefficients and their errors need {FEWEST} points (of {over}, reward), got {len(points)}"
        )
    wrong = [point for point in points if not all(map(math.isfinite, point))]
    if wrong:
        raise ValueError(f"points (of {over}, reward) have to be numbers; one is {wrong[0]}: leave such steps out")
    rows = np.array([columns(place) for place, _ in points], dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=0)
    if lengths.min() == 0 or np.linalg.svd(rows / lengths, compute_uv=False)[1] < COLLINEAR:
        places = [place for place, _ in points]
        raise ValueError(
            f"{over} is between {min(places):g} and {max(places):g} in all {len(points)} points, which does not tell "
            "two coefficients apart: points from more of the run are needed"
        )
    root = np.linalg.inv(np.linalg.qr(rows / lengths, mode="r")) / lengths[:, None]
    inverse = root @ root.T
    reward = np.array([reward for _, reward in points], dtype=np.float64)
    theta = inverse @ (rows.T @ reward)
    squares = float(((reward - rows @ theta) ** 2).sum())
    return Fitted(theta, inverse, math.sqrt(squares / (len(points) - 2)), len(points))


def of_rl(distance: float) -> Columns:
    """Return the columns of α and β under RL: d and −d·log d; at d = 0 their limit, 0."""
    return distance, -distance * math.log(distance) if distance > 0 else 0.0


def of_best_of_n(distance: float) -> Columns:
    """Return the columns of α and β under best of n: d and −d²."""
    return distance, -distance * distance


@dataclass(frozen=True)
class OveroptimisationLaw:
    """The law of over-optimisation, R(d) − R(0), with α and β fitted. ``best_of_n``: in its form for best of n, else in
    that for RL."""

    fit: Fitted
    best_of_n: bool = False

    @property
    def alpha(self) -> float:
        return float(self.fit.theta[0])

    @property
    def beta(self) -> float:
        return float(self.fit.theta[1])

    @property
    def peak(self) -> tuple[float, float] | None:
        """The distance d* at which R(d) is largest, and R(d*) − R(0); None if there is no such distance.

        There is none if R rises forever (β ≤ 0) or, with best of n, falls from the start (α ≤ 0), nor if d* is larger
        than any float64.
        RL: R' = α − β·log d − β = 0, d* = exp(α/β − 1), R = β·d*.  Best of n: d* = α/(2β), R = α²/(4β).
        """
        if self.beta <= 0 or (self.best_of_n and self.alpha <= 0):
            return None
        if self.best_of_n:
            return self.alpha / (2 * self.beta), self.alpha**2 / (4 * self.beta)
        ratio = self.alpha / self.beta - 1
        if ratio > math.log(np.finfo(np.float64).max):  # β is 0 but for rounding
            return None
        return math.exp(ratio), self.beta * math.exp(ratio)

    def at(self, distance: float) -> Prediction:
        """Predict R(d) − R(0). Raises ValueError for a negative distance."""
        columns = of_best_of_n if self.best_of_n else of_rl
        return self.fit.at(columns(_distance(distance)))


def overoptimisation_law(points: Points, *, best_of_n: bool = False) -> OveroptimisationLaw:
    """Fit the law of over-optimisation to points (√KL, reward − reward of the start), KL in nats per completion.

    A KL that was estimated below 0 has no root: give such a step d = 0, or leave it out. Raises ValueError as
    `least_squares` does, and for a negative distance.
    """
    for distance, _ in points:
        _distance(distance)
    columns = of_best_of_n if best_of_n else of_rl
    return OveroptimisationLaw(least_squares(points, columns, "√KL"), best_of_n)


def _distance(distance: float) -> float:
    """Return a distance √KL unchanged; raise ValueError if it is negative."""
    if distance < 0:
        raise ValueError(f"a distance √KL is {distance:g}; it is 0 at the start and above 0 elsewhere")
    return distance


@dataclass(frozen=True)
class EntropyLaw:
    """The law of entropy, R = −a·e^H + b, with a and b fitted."""

    fit: Fitted

    @property
    def a(self) -> float:
        return float(self.fit.theta[0])

    @property
    def b(self) -> float:
        return float(self.fit.theta[1])

    def at(self, entropy: float) -> Prediction:
        """Predict the reward R at an entropy of H nats a token. At H = 0 it is the ceiling b − a: nothing is left to
        explore."""
        return self.fit.at((-math.exp(entropy), 1.0))


def entropy_law(run: Points, share: float = 1 / 3) -> EntropyLaw:
    """Fit the law of entropy to the first part of a run, by which the rest of it can be predicted.

    ``run``: points (entropy in nats a token, reward) in the order of the steps; ``share``: of them, how many are
    fitted, rounded up. Raises ValueError as `least_squares` does, and for a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"`share` of the run that is fitted is {share}; it lies in (0, 1]")
    first = run[: math.ceil(round(len(run) * share, 9))]
    return EntropyLaw(least_squares(first, lambda entropy: (-math.exp(entropy), 1.0), "entropy"))
