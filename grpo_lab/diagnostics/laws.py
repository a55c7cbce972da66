"""Two laws that a run is held against, fitted by least squares. Pure: points in, numbers out; float64.

    over-optimisation   R(d) = d·(α − β·log d)   RL               Gao, Schulman, Hilton, arXiv 2210.10760, eq. 2
                        R(d) = d·(α − β·d)       best of n        eq. 1
    entropy             R(H) = −a·exp(H) + b     policy entropy   arXiv 2505.22617

d = √KL(π‖π_start), KL in nats a completion; R: what was gained over the start, R(0) = 0; H: mean entropy of a token,
nats; there R is the accuracy itself, and b − a is what is left to reach when H is 0.

All three are linear in two coefficients, so the fit is closed: c = (XᵀX)⁻¹Xᵀy, covariance s²·(XᵀX)⁻¹ with
s² = RSS/(n − 2). The standard errors hold for points whose errors are independent of each other. Those of one run are
not quite (a batch that was easy for one step's policy is no other step's, but a run that went astray stays so): the
spread over seeds is the better one where there are seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Points = Sequence[tuple[float, float]]
"""(x, R): x is d, or H."""
Array = NDArray[np.float64]
_SPREAD = 1e-9
"""Of the two regressors, each of length 1: the smaller singular value below which they are one and the same."""


class Predicted(NamedTuple):
    """R at some x. ``error``: standard error of the law there; ``error_of_point``: of one new point, its own scatter s
    in it."""

    value: float
    error: float
    error_of_point: float


@dataclass(frozen=True)
class _Law:
    """Two coefficients, their standard errors, and what they predict."""

    coefficients: tuple[float, float]
    covariance: tuple[tuple[float, float], tuple[float, float]]
    scatter: float
    """s: standard deviation of a point around the law."""
    points: int
    reads: ClassVar[str] = "x"

    @staticmethod
    def regressors(x: float) -> tuple[float, float]:
        raise NotImplementedError

    @property
    def errors(self) -> tuple[float, float]:
        """Standard errors of the coefficients."""
        return math.sqrt(self.covariance[0][0]), math.sqrt(self.covariance[1][1])

    def __call__(self, x: float) -> float:
        """R there."""
        first, second = self.regressors(x)
        return self.coefficients[0] * first + self.coefficients[1] * second

    def at(self, x: float, points: int = 1) -> Predicted:
        """R there with its errors. ``points``: the new point is a mean of so many."""
        row = np.array(self.regressors(x))
        variance = max(float(row @ np.array(self.covariance) @ row), 0.0)
        return Predicted(self(x), math.sqrt(variance), math.sqrt(variance + self.scatter**2 / points))


class RLOverOptimisation(_Law):
    """R(d) = d·(α − β·log d) of RL: ``coefficients`` are (α, β)."""

    reads = "d"

    @staticmethod
    def regressors(x: float) -> tuple[float, float]:
        return x, -x * math.log(x) if x > 0 else 0.0

    @property
    def peak(self) -> float | None:
        """d* = exp(α/β − 1), where R is highest; it is β·d* there. None where β ≤ 0: more is better without an end."""
        alpha, beta = self.coefficients
        if beta <= 0:
            return None
        return math.exp(min(alpha / beta - 1, math.log(np.finfo(np.float64).max)))


class BestOfNOverOptimisation(_Law):
    """R(d) = d·(α − β·d) of the best of n: ``coefficients`` are (α, β). Its d follows from n: `best_of_n_kl`."""

    reads = "d"

    @staticmethod
    def regressors(x: float) -> tuple[float, float]:
        return x, -x * x

    @property
    def peak(self) -> float | None:
        """d* = α/(2β), where R is highest, and 0 where it only falls; None where β ≤ 0."""
        alpha, beta = self.coefficients
        return None if beta <= 0 else max(alpha / (2 * beta), 0.0)


class EntropyLaw(_Law):
    """R(H) = −a·exp(H) + b: ``coefficients`` are (a, b)."""

    reads = "H"

    @staticmethod
    def regressors(x: float) -> tuple[float, float]:
        return -math.exp(x), 1.0

    @property
    def ceiling(self) -> Predicted:
        """R at H = 0, b − a: all that entropy can be traded for."""
        return self.at(0.0)


Law = TypeVar("Law", bound=_Law)


def over_optimisation(points: Points) -> RLOverOptimisation:
    """The law of RL from (d, R − R(0)), any order; a point at d = 0 says nothing. ValueError: fewer than three points
    with d > 0, all at one d, a negative d, or a number that is none."""
    return _fitted(RLOverOptimisation, _distances(points))


def best_of_n_over_optimisation(points: Points) -> BestOfNOverOptimisation:
    """The law of the best of n from (d, R − R(0)). ValueError as in `over_optimisation`."""
    return _fitted(BestOfNOverOptimisation, _distances(points))


def best_of_n_kl(n: int) -> float:
    """KL of the best of n samples to the policy that made them, nats: log n − (n − 1)/n (arXiv 2210.10760, §3)."""
    if n < 1:
        raise ValueError(f"n is {n}: best of at least 1 sample")
    return math.log(n) - (n - 1) / n


def entropy_law(points: Points) -> EntropyLaw:
    """The law from (H, R), any order. ValueError: fewer than three points, all at one H, or a number that is none."""
    return _fitted(EntropyLaw, points)


class Forecast(NamedTuple):
    """What the first part of a run says of its end.

    Args:
        law: of the first part.
        entropy: at the end, nats: log of the mean of exp(H), for which the law of means is exact.
        predicted: R at that entropy; ``error_of_point`` is that of a mean of as many points as the end has.
        measured: mean R of the end.
        ceiling: predicted R at H = 0.
    """

    law: EntropyLaw
    entropy: float
    predicted: Predicted
    measured: float
    ceiling: Predicted


def forecast(run: Points, first: float = 1 / 3, last: float = 1 / 10) -> Forecast:
    """The entropy law fitted on the ``first`` share of a run's points (H, R), in their order, against the ``last``
    share. The prediction is given H at the end: it says what R goes with it, not how far H falls. ValueError: a share
    outside (0, 1), shares that overlap, or too little in the first part for `entropy_law`."""
    if not (0 < first < 1 and 0 < last < 1 and first + last <= 1):
        raise ValueError(
            f"`first` is {first:g} and `last` {last:g}: shares of one run, between 0 and 1, at most 1 in all"
        )
    law = entropy_law(run[: math.ceil(first * len(run))])
    end = run[len(run) - max(1, math.floor(last * len(run))) :]
    entropy = math.log(math.fsum(math.exp(h) for h, _ in end) / len(end))
    measured = math.fsum(reward for _, reward in end) / len(end)
    return Forecast(law, entropy, law.at(entropy, len(end)), measured, law.ceiling)


def _distances(points: Points) -> Points:
    if wrong := [d for d, _ in points if d < 0]:
        raise ValueError(
            f"d is {wrong[0]:g}: √KL is not negative (an estimate of the KL may be: average it, or take 0)"
        )
    return [(d, reward) for d, reward in points if d != 0]


def _fitted(law: type[Law], points: Points) -> Law:
    name = law.reads
    if wrong := [point for point in points if not all(map(math.isfinite, point))]:
        raise ValueError(f"a point ({name}, R) is {wrong[0]}: numbers are needed; leave it out")
    if len(points) < 3:
        raise ValueError(f"{len(points)} points ({name}, R) for two coefficients and an error: at least 3 are needed")
    x = np.array([law.regressors(at) for at, _ in points], dtype=np.float64)
    y = np.array([reward for _, reward in points], dtype=np.float64)
    length = np.linalg.norm(x, axis=0)
    if not length.all() or np.linalg.svd(x / length, compute_uv=False)[-1] < _SPREAD:
        lowest, highest = min(points)[0], max(points)[0]
        raise ValueError(
            f"{len(points)} points have no spread: {name} lies between {lowest:g} and {highest:g}, and a law of two "
            f"coefficients needs two different {name}; take points from farther apart in the run"
        )
    root = np.linalg.inv(np.linalg.qr(x / length, mode="r")) / length[:, None]  # (XᵀX)⁻¹ = root·rootᵀ
    found = root @ root.T @ (x.T @ y)
    found = found + root @ root.T @ (x.T @ (y - x @ found))  # one refinement: what rounding left
    scatter = math.sqrt(float(np.square(y - x @ found).sum()) / (len(points) - 2))
    (aa, ab), (ba, bb) = (scatter**2 * root @ root.T).tolist()
    return law((float(found[0]), float(found[1])), ((aa, ab), (ba, bb)), scatter, len(points))
