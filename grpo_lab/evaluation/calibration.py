"""Calibration: how sure a model was against how often it was right.

Pure functions: pairs (confidence, correct) in, numbers out. `calibrated` computes three numbers with their intervals:

    ECE = Σ_b (n_b / N) · |mean correct in b − mean confidence in b|       Naeini, Cooper, Hauskrecht, AAAI 2015
    Brier = mean (confidence − correct)²                                   Brier 1950

ECE depends on how answers are put into bins. It is computed twice: with bins of equal width, and with bins of equal
mass, each of which holds as many answers, so that none is empty. ECE is biased upwards where bins hold few answers:
even a calibrated model has an ECE above 0. The bootstrap interval shows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.evaluation.statistics import Interval, Vote, majority_vote

BINS = 10
"""Default number of bins of an ECE."""
DRAWS = 1000
"""Number of bootstrap draws of the problems. A 95% interval goes from the 2.5% to the 97.5% quantile of the draws."""
Pairs = Sequence[tuple[float, float]]
"""Pairs (confidence, correct), both in [0, 1]. ``correct`` is a fraction if a vote was tied."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ConfidenceBin:
    """Answers of similar confidence.

    Attributes:
        confidence: their mean confidence, in [0, 1].
        correct: the share of them that are right.
        n: how many they are.
    """

    confidence: float
    correct: float
    n: int


@dataclass(frozen=True)
class Calibration:
    """How well confidence and correctness agree, with 95% bootstrap intervals.

    Attributes:
        ece: expected calibration error with bins of equal width.
        ece_equal_mass: expected calibration error with bins that hold as many answers each.
        brier: Brier score.
        bins: the bins of equal width that hold answers, by rising confidence.
    """

    ece: Interval
    ece_equal_mass: Interval
    brier: Interval
    bins: list[ConfidenceBin]


def calibrated(pairs: Pairs, draws: int = DRAWS, seed: int = 0) -> Calibration:
    """Measure the calibration of ``pairs``, one for each problem, with 95% intervals by a bootstrap over problems.

    Args:
        pairs: confidence and correctness of each answer, both in [0, 1].
        draws: number of bootstrap draws.
        seed: seed of these draws.

    Raises:
        ValueError: there are no pairs, or one has a value outside [0, 1] (NaN included).
    """
    both = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    wrong = both[~((both >= 0) & (both <= 1)).all(1)]  # NaN is in no range, so it counts as wrong
    if len(wrong) or not len(both):
        raise ValueError(f"calibration needs pairs (confidence, correct) in [0, 1], got {wrong[:1].tolist() or 'none'}")

    def estimates(answers: Array) -> list[float]:
        sure, right = answers.T
        of_bins = [ece(sure, right, bins) for bins in (equal_width(sure), equal_mass(sure))]
        return [*of_bins, float(((sure - right) ** 2).mean())]

    drawn = np.random.default_rng(seed).integers(len(both), size=(draws, len(both)))
    low, high = np.quantile([estimates(both[rows]) for rows in drawn], [0.025, 0.975], axis=0)
    limits = zip(estimates(both), low.tolist(), high.tolist(), strict=True)
    of_width, of_mass, brier = (Interval(*one, len(both)) for one in limits)
    sure, right = both.T
    return Calibration(of_width, of_mass, brier, reliability(sure, right, equal_width(sure)))


def equal_width(confidence: Array, bins: int = BINS) -> NDArray[np.int64]:
    """Return the bin number ``[N]`` of each confidence ``[N]``: bin b holds (b/B, (b+1)/B], and bin 0 also holds 0."""
    return np.clip(np.ceil((confidence * bins).round(9)).astype(np.int64) - 1, 0, bins - 1)


def equal_mass(confidence: Array, bins: int = BINS) -> NDArray[np.int64]:
    """Return the bin number ``[N]`` of each confidence ``[N]``, so that bins rise in confidence and hold equally many
    answers, as far as equal confidences, which share a bin, allow."""
    return np.searchsorted(np.sort(confidence), confidence, side="left") * bins // len(confidence)


def reliability(confidence: Array, correct: Array, bins: NDArray[np.int64]) -> list[ConfidenceBin]:
    """Summarise each bin that holds answers, by rising confidence. All three arguments are ``[N]``."""
    n = np.bincount(bins)
    sums = (np.bincount(bins, weights=values) for values in (confidence, correct))
    found = zip(*sums, n, strict=True)
    return [ConfidenceBin(float(p / count), float(y / count), int(count)) for p, y, count in found if count]


def ece(confidence: Array, correct: Array, bins: NDArray[np.int64]) -> float:
    """Compute the expected calibration error from confidence, correctness and bin number of each answer, all
    ``[N]``."""
    return float(np.abs(np.bincount(bins, weights=correct - confidence)).sum() / len(confidence))


def agreement(votes: Sequence[Sequence[Vote]]) -> list[tuple[float, float]]:
    """Return (confidence, correct) for each problem, from how far its samples agree.

    The confidence is the share of the samples that give the most frequent answer; a sample without an answer counts in
    the denominator only. ``correct`` is `majority_vote`: whether that answer is right, or a fraction where several
    answers are equally frequent.
    """
    found = []
    for of_problem in votes:
        names = [answer for answer, _ in of_problem if answer is not None]
        most = max((names.count(name) for name in set(names)), default=0)
        found.append((most / len(of_problem), majority_vote(of_problem)))
    return found
