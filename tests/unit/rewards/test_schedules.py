"""Reward schedules: pure functions of the step."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.rewards.schedules import Constant, Cosine, Linear, Piecewise, Schedule, Warmup, schedule_from

SPECS = [
    0.5,
    {"kind": "constant", "value": 0.5},
    {"kind": "warmup", "start": 100, "value": 0.5},
    {"kind": "linear", "start": 10, "end": 20, "value": 1.0},
    {"kind": "linear", "start": 0, "end": 4, "initial": 1.0, "value": 0.0},
    {"kind": "cosine", "start": 10, "end": 20, "initial": 0.2, "value": 1.0},
    {"kind": "piecewise", "points": [[0, 0.0], [5, 1.0], [9, 0.25]]},
]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (0.5, {0: 0.5, 10**6: 0.5}),
        ({"kind": "warmup", "start": 3, "value": 0.5}, {0: 0.0, 2: 0.0, 3: 0.5, 4: 0.5, 10**6: 0.5}),
        ({"kind": "warmup", "start": 0, "value": 0.5}, {0: 0.5}),
        # 10 … 20 in ten equal parts of 0.1: at 13 three of them
        ({"kind": "linear", "start": 10, "end": 20, "value": 1.0}, {0: 0.0, 10: 0.0, 13: 0.3, 20: 1.0, 99: 1.0}),
        ({"kind": "linear", "start": 0, "end": 4, "initial": 1.0, "value": 0.0}, {0: 1.0, 1: 0.75, 4: 0.0, 5: 0.0}),
        # half-way: (1 − cos(π/2))/2 = 1/2; a third: (1 − cos(π/3))/2 = 1/4
        ({"kind": "cosine", "start": 0, "end": 6, "value": 2.0}, {0: 0.0, 2: 0.5, 3: 1.0, 6: 2.0, 7: 2.0}),
        ({"kind": "piecewise", "points": [[0, 0.0], [5, 1.0], [9, 0.25]]}, {0: 0, 4: 0, 5: 1, 8: 1, 9: 0.25, 99: 0.25}),
    ],
)
def test_values(spec: object, expected: dict[int, float]) -> None:
    schedule = schedule_from(spec)  # type: ignore[arg-type]
    for step, weight in expected.items():
        assert schedule(step) == pytest.approx(weight, abs=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_survives_pickle_and_its_own_mapping(spec: object) -> None:
    schedule = schedule_from(spec)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule_from(schedule.as_mapping()) == schedule
    assert schedule_from(schedule) is schedule


@given(step=st.integers(0, 300))
def test_ramps_stay_between_their_ends_and_rise(step: int) -> None:
    for ramp in (Linear(50, 200, 1.0, 0.2), Cosine(50, 200, 1.0, 0.2)):
        assert 0.2 <= ramp(step) <= ramp(step + 1) <= 1.0


def test_only_constants_need_no_progress() -> None:
    constant = [Constant(1.0), Piecewise(((0, 1.0),))]
    changing: list[Schedule] = [Warmup(1, 1.0), Linear(0, 1, 1.0), Piecewise(((0, 1.0), (2, 0.0)))]
    assert all(s.is_constant for s in constant)
    assert not any(s.is_constant for s in changing)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"kind": "warmpu", "start": 1, "value": 1.0}, "did you mean 'warmup'"),
        ({"kind": "warmup", "begin": 1, "value": 1.0}, "no setting 'begin'"),
        ({"kind": "warmup", "value": 1.0}, "needs `start`"),
        ({"kind": "warmup", "start": -1, "value": 1.0}, "`start` is -1; it must be a whole number of at least 0"),
        ({"kind": "warmup", "start": 1, "value": float("nan")}, "`value` is nan; it must be a number"),
        ({"kind": "linear", "start": 5, "end": 5, "value": 1.0}, "for a jump use kind 'warmup'"),
        ({"kind": "piecewise", "points": [[1, 0.5]]}, "must start at step 0"),
        ({"kind": "piecewise", "points": [[0, 0.5], [0, 0.7]]}, "rise strictly"),
        ({"kind": "piecewise", "points": [0, 0.5]}, r"is \[0, 0.5\]; it must be pairs \[step, value\]"),
        ({"kind": "piecewise", "points": 0.5}, r"is 0.5; it must be pairs \[step, value\]"),
        ({"kind": "piecewise", "points": [[0, 0.5, 1]]}, r"pairs \[step, value\]"),
        ({"kind": ["warmup"]}, r"unknown schedule kind \['warmup'\]"),
        ({"value": 1.0}, "unknown schedule kind None"),
        ("0.5", "a number, a mapping"),
        (True, "a number, a mapping"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(spec: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        schedule_from(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 0.5, True])
def test_bad_steps_are_refused(step: object) -> None:
    with pytest.raises(ValueError, match="finished optimizer steps"):
        Constant(1.0)(step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (0.25, "0.5"),
        ({"kind": "warmup", "start": 0, "value": 0.5}, "1"),
        ({"kind": "cosine", "start": 2, "end": 4, "initial": 0.5, "value": 1}, "1 to 2 over the steps 2 to 4 (cosine)"),
        ({"kind": "piecewise", "points": [[0, 1], [5, 0.5]]}, "2 from step 0 on, 1 from step 5 on"),
    ],
)
def test_in_words(spec: Any, words: str) -> None:
    assert schedule_from(spec).in_words(2.0) == words
