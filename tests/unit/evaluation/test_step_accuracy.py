"""Accuracy, AUC and ProcessBench's F1 of step scores, against what they say literally."""

from __future__ import annotations

import random

import numpy as np
import pytest

from grpo_lab.evaluation.step_accuracy import area, first_wrong_f1, first_wrong_step, step_accuracy


def test_the_area_counts_pairs() -> None:
    draw = random.Random(0)
    scores = [round(draw.random(), 1) for _ in range(60)]
    right = [draw.random() < score for score in scores]
    pairs = [(a, b) for a, good in zip(scores, right) if good for b, other in zip(scores, right) if not other]
    counted = sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
    assert any(a == b for a, b in pairs)
    assert area(np.array(scores), np.array(right)) == pytest.approx(counted, abs=1e-12)
    assert np.isnan(area(np.array([0.5]), np.array([True])))


def test_accuracy_balanced_and_majority() -> None:
    problems = [[(0.9, 1.0), (0.8, 1.0), (0.4, 0.7)], [(0.6, 0.2), (0.1, 0.0)], [], [(0.5, 0.5)]]
    found = step_accuracy(problems)
    assert (found.steps, found.accuracy.n) == (6, 3)
    assert found.accuracy.value == pytest.approx(4 / 6)
    assert found.majority == pytest.approx(4 / 6)
    assert found.balanced.value == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert found.accuracy.low < found.accuracy.value < found.accuracy.high
    assert found.to_dict()["auc"]["value"] == pytest.approx((2 * 2 + 1 + 1) / 8)
    with pytest.raises(ValueError, match="at least one step"):
        step_accuracy([[]])


def test_intervals_are_as_wide_as_problems_are_few() -> None:
    """Ten copies of each step within its problem say nothing more, and ten times the problems do."""
    draw = random.Random(1)
    problems = [[(draw.random(), float(draw.random() < 0.5))] for _ in range(40)]
    width = {}
    for name, steps in {"plain": problems, "copied": [one * 10 for one in problems], "more": problems * 10}.items():
        accuracy = step_accuracy(steps).accuracy
        width[name] = accuracy.high - accuracy.low
    assert width["copied"] == pytest.approx(width["plain"])
    assert width["more"] == pytest.approx(width["plain"] / 10**0.5, rel=0.15)


def test_first_wrong_steps() -> None:
    assert first_wrong_step([0.9, None, 0.4, 0.1]) == 2
    assert first_wrong_step([0.5, None]) is None
    problems = [[(2, 2), (1, 2), (0, 0)], [], [(2, 1), (None, None), (None, None), (1, None)], [(None, None)]]
    found = first_wrong_f1(problems)
    assert (found.wrong, found.right, found.f1.n) == (0.5, 0.75, 3)
    assert found.f1.value == pytest.approx(2 * 0.5 * 0.75 / 1.25)
    assert first_wrong_f1([[(1, 0), (1, None)]]).f1.value == 0
    for one_kind, seen in (([], "0 of 0"), ([[(1, 1)]], "1 of 1"), ([[(None, None)]], "0 of 1")):
        with pytest.raises(ValueError, match=f"solutions without one: {seen} have one"):
            first_wrong_f1(one_kind)


def test_intervals_of_first_wrong_steps_are_over_problems() -> None:
    """Four copies of each solution within its problem say nothing more."""
    draw = random.Random(2)
    problems = [[(draw.choice([None, 0, 1]), draw.choice([None, 0]))] for _ in range(60)]
    plain = first_wrong_f1(problems).f1
    copied = first_wrong_f1([one * 4 for one in problems]).f1
    assert (copied.low, copied.high) == pytest.approx((plain.low, plain.high))
