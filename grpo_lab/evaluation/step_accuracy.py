"""Accuracy of step scores: how well they tell right steps from wrong ones.

Pure functions: scores and labels in, numbers out.

    accuracy    share of the steps whose score lies on the same side of ½ as their label; chance is the larger class
    balanced    mean of that share among the right steps and among the wrong ones; chance is ½
    AUC         P(a right step scores above a wrong one), a tie counts ½; chance is ½     Hanley & McNeil, 1982
    F1          of first wrong steps: harmonic mean of how often the first wrong step of a wrong solution is found, and
                how often a right solution is said to have none                  ProcessBench (arXiv 2412.06559)

Steps of one problem are not independent, so intervals are by bootstrap over problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_lab.evaluation.calibration import DRAWS
from grpo_lab.evaluation.statistics import Interval

MIDDLE = 0.5
"""Score from which on a step is said to be right, and label from which on it is right."""
Array = NDArray[np.float64]
Scored = Sequence[tuple[float, float]]
"""Pairs (score, label) of steps."""
FirstSteps = Sequence[tuple[int | None, int | None]]
"""Pairs (first wrong step that was said, true one) of solutions; None: no step is wrong."""


@dataclass(frozen=True)
class StepAccuracy:
    """How well scores tell right steps from wrong ones, with 95% intervals.

    Attributes:
        accuracy: share of the steps whose score lies on the same side of ½ as their label.
        majority: accuracy of always saying the larger class.
        balanced: mean of the accuracies on right and on wrong steps; NaN if all steps are of one class.
        auc: probability that a right step scores above a wrong one; NaN if all steps are of one class.
        steps: number of steps.
    """

    accuracy: Interval
    majority: float
    balanced: Interval
    auc: Interval
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON writes them."""
        names = ("accuracy", "balanced", "auc")
        intervals = {name: getattr(self, name).to_dict() for name in names}
        return {**intervals, "majority": self.majority, "steps": self.steps}


def step_accuracy(problems: Sequence[Scored], draws: int = DRAWS, seed: int = 0) -> StepAccuracy:
    """Measure the scores of steps.

    Args:
        problems: for each problem the (score, label) of its steps.
        draws: number of bootstrap draws of the problems.
        seed: seed of these draws.

    Raises:
        ValueError: there is no step.
    """
    parts = [np.array(steps, dtype=np.float64).reshape(-1, 2) for steps in problems if len(steps)]
    if not parts:
        raise ValueError("step accuracy needs at least one step with a score and a label")
    whole = np.concatenate(parts)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(parts), size=(draws, len(parts)))
    found = [_estimates(np.concatenate([parts[at] for at in places])) for places in drawn]
    low, high = np.nanquantile(found, [0.025, 0.975], axis=0)
    limits = zip(_estimates(whole), low.tolist(), high.tolist(), strict=True)
    accuracy, balanced, auc = (Interval(*one, len(parts)) for one in limits)
    right = float((whole[:, 1] >= MIDDLE).mean())
    return StepAccuracy(accuracy, max(right, 1 - right), balanced, auc, len(whole))


def _estimates(steps: Array) -> list[float]:
    """Return accuracy, balanced accuracy and AUC of steps ``[S, 2]`` (score, label); the last two are NaN if there is
    one class only."""
    said = steps[:, 0] >= MIDDLE
    right = steps[:, 1] >= MIDDLE
    balanced = float("nan")
    if right.any() and not right.all():
        balanced = float((said[right].mean() + (~said[~right]).mean()) / 2)
    return [float((said == right).mean()), balanced, area(steps[:, 0], right)]


def area(scores: Array, right: NDArray[np.bool_]) -> float:
    """Return the AUC, the share of pairs of a right and a wrong step in which the right one scores higher; a tie counts
    ½. NaN without pairs."""
    wrong = np.sort(scores[~right])
    good = scores[right]
    pairs = len(good) * len(wrong)
    if not pairs:
        return float("nan")
    below = np.searchsorted(wrong, good, side="left").sum()
    ties = np.searchsorted(wrong, good, side="right").sum() - below
    return float((below + ties / 2) / pairs)


@dataclass(frozen=True)
class FirstWrong:
    """ProcessBench's numbers.

    Attributes:
        wrong: share of the wrong solutions whose first wrong step is found.
        right: share of the right solutions that are said to have no wrong step.
        f1: harmonic mean of the two, with its 95% interval.
    """

    wrong: float
    right: float
    f1: Interval


def first_wrong_step(scores: Sequence[float | None]) -> int | None:
    """Return the index of the first step that scores below ½; None if there is none. A step without a score is passed
    over."""
    return next((at for at, score in enumerate(scores) if score is not None and score < MIDDLE), None)


def first_wrong_f1(problems: Sequence[FirstSteps], draws: int = DRAWS, seed: int = 0) -> FirstWrong:
    """Measure how well first wrong steps are found.

    Args:
        problems: for each problem the (step that was said, true step) of its solutions; None: no step is wrong.
        draws: number of bootstrap draws of the problems.
        seed: seed of these draws.

    Raises:
        ValueError: not both kinds of solutions are there, with a wrong step and without one.
    """
    wrong = [true is not None for solutions in problems for _, true in solutions]
    if all(wrong) or not any(wrong):
        needed = "F1 of first wrong steps needs solutions with a wrong step, and solutions without one"
        raise ValueError(f"{needed}: {sum(wrong)} of {len(wrong)} have one")
    parts = [_found_and_wrong(solutions) for solutions in problems if solutions]
    whole = np.concatenate(parts)
    drawn = np.random.default_rng(seed).integers(len(parts), size=(draws, len(parts)))
    values = [_f1(np.concatenate([parts[at] for at in places])) for places in drawn]
    low, high = np.nanquantile(values, [0.025, 0.975]).tolist()
    found = whole[:, 0]
    is_wrong = whole[:, 1]
    f1 = Interval(_f1(whole), low, high, len(parts))
    return FirstWrong(float(found[is_wrong].mean()), float(found[~is_wrong].mean()), f1)


def _found_and_wrong(solutions: FirstSteps) -> NDArray[np.bool_]:
    """Return two flags for each solution, ``[n, 2]``: what was said is true; the solution has a wrong step."""
    return np.array([(said == true, true is not None) for said, true in solutions])


def _f1(solutions: NDArray[np.bool_]) -> float:
    """Compute F1 from the flags of `_found_and_wrong`; NaN if all solutions are of one kind."""
    found = solutions[:, 0]
    is_wrong = solutions[:, 1]
    if is_wrong.all() or not is_wrong.any():
        return float("nan")
    of_wrong = float(found[is_wrong].mean())
    of_right = float(found[~is_wrong].mean())
    if of_wrong + of_right == 0:
        return 0.0
    return 2 * of_wrong * of_right / (of_wrong + of_right)
