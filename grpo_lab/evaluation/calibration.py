"""Calibration: how sure a model was against how often it was right. Pure: pairs (confidence, correct) in, numbers out.

    ECE = Σ_b (n_b / N) · |mean correct in b − mean confidence in b|       Naeini, Cooper, Hauskrecht, AAAI 2015
    Brier = mean (confidence − correct)²                                   Brier 1950

ECE depends on the bins: they have equal width, or equal mass (as many answers in each), which does not rest on empty
bins. It is biased upwards where bins are small (a calibrated model has an ECE above 0), which its interval shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.evaluation.statistics import Interval, Vote, majority_vote

BINS = 10
DRAWS = 1000
"""Number of bootstrap draws of the problems. The interval reaches from their 2.5% to their 97.5% quantile."""
Pairs = Sequence[tuple[float, float]]
"""Pairs (confidence, correct), both in [0, 1]. ``correct`` is a fraction where a vote was tied."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ConfidenceBin:
    """A bin of answers with similar confidence: its mean, the share of right answers, their number."""

    confidence: float
    correct: float
    n: int


@dataclass(frozen=True)
class Calibration:
    """ECE with bins of equal width and of equal mass, and the Brier score; ``bins``: those of equal width."""

    ece: Interval
    ece_equal_mass: Interval
    brier: Interval
    bins: list[ConfidenceBin]


def calibrated(pairs: Pairs, draws: int = DRAWS, seed: int = 0) -> Calibration:
    """Measure the calibration of ``pairs`` (confidence, correct), with 95% bootstrap intervals over them. Raises
    ValueError if there is none, or one outside [0, 1]."""
    both = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    wrong = both[~((both >= 0) & (both <= 1)).all(1)]  # also of NaN
    if len(wrong) or not len(both):
        raise ValueError(f"calibration needs pairs (confidence, correct) in [0, 1], got {wrong[:1].tolist() or 'none'}")

    def estimates(pairs: Array) -> list[float]:
        sure, right = pairs.T
        of_bins = [ece(sure, right, bins) for bins in (equal_width(sure), equal_mass(sure))]
        return [*of_bins, float(((sure - right) ** 2).mean())]

    drawn = np.random.default_rng(seed).integers(len(both), size=(draws, len(both)))
    low, high = np.quantile([estimates(both[rows]) for rows in drawn], [0.025, 0.975], axis=0)
    limits = zip(estimates(both), low.tolist(), high.tolist(), strict=True)
    of_width, of_mass, brier = (Interval(*one, len(both)) for one in limits)
    sure, right = both.T
    return Calibration(of_width, of_mass, brier, reliability(sure, right, equal_width(sure)))


def equal_width(confidence: Array, bins: int = BINS) -> NDArray[np.int64]:
    """Return the bin of each answer: bin b holds confidences in (b/B, (b+1)/B], and the first also 0."""
    return np.clip(np.ceil((confidence * bins).round(9)).astype(np.int64) - 1, 0, bins - 1)


def equal_mass(confidence: Array, bins: int = BINS) -> NDArray[np.int64]:
    """Return the bin of each answer, by rising confidence and with as many in each; equal confidences share a bin."""
    return np.searchsorted(np.sort(confidence), confidence, side="left") * bins // len(confidence)


def reliability(confidence: Array, correct: Array, bins: NDArray[np.int64]) -> list[ConfidenceBin]:
    """Summarise the bins that hold answers, by rising confidence."""
    n = np.bincount(bins)
    sums = (np.bincount(bins, weights=values) for values in (confidence, correct))
    found = zip(*sums, n, strict=True)
    return [ConfidenceBin(float(p / count), float(y / count), int(count)) for p, y, count in found if count]


def ece(confidence: Array, correct: Array, bins: NDArray[np.int64]) -> float:
    """Compute the expected calibration error over the bins."""
    return float(np.abs(np.bincount(bins, weights=correct - confidence)).sum() / len(confidence))


def agreement(votes: Sequence[Sequence[Vote]]) -> list[tuple[float, float]]:
    """Return for each problem the share of its samples that give the most frequent answer, and whether that is right (a
    tie is broken at random, so it can be a fraction). Samples without an answer agree with nothing."""
    found = []
    for of_problem in votes:
        names = [answer for answer, _ in of_problem if answer is not None]
        most = max((names.count(name) for name in set(names)), default=0)
        found.append((most / len(of_problem), majority_vote(of_problem)))
    return found
