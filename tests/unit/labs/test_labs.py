"""``grpo_lab.labs``: what is said of seeds, and arms at equal generated tokens."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.evaluation.power import power_said
from grpo_lab.labs.cells import LabCell
from grpo_lab.labs.experiment import Experiment
from grpo_lab.labs.tables import at_equal_tokens, over_tokens, until


def test_power_from_a_pilot_by_hand() -> None:
    """Arms 0.78, 0.80, 0.82 and 0.80, 0.80, 0.80: variances 4 and 0 points², pooled 2, spread 1.4. 64 seeds for half a
    spread are the textbook's (tests of ``seeds_needed``). The evaluation: √(0.8 · 0.2 / 400) = 2.0 points."""
    pilot = [[0.78, 0.80, 0.82], [0.80, 0.80, 0.80]]
    lines = power_said(pilot, 3, difference=math.sqrt(2) / 2, problems=400).split("\n  ")
    assert lines[0] == (
        "power: spread 1.4 points over seeds (over 6 results of 2 arms), of which the evaluation's 400 problems make "
        "up to 2.0: more problems lower it, too"
    )
    assert lines[1] == "a difference of 0.707107 points needs 64 seeds an arm; here 3: too few"
    # three seeds see 3.071 spreads (simulated in test_evaluation_statistics.py): 3.071 · 1.414 = 4.3
    assert lines[2] == "3 seeds an arm see differences from 4.3 points on (80% chance, two-sided t test at 5%)"
    assert "needs 64 seeds an arm; here 64: enough" in power_said([], 64, difference=0.5, spread=1.0)


def test_power_without_a_spread_says_so() -> None:
    assert power_said([[0.5]], 3).startswith("power: not known, since no arm has two seeds and there is no --spread")
    assert power_said([[0.5, 0.5]], 3).startswith("power: not known, since all seeds of an arm came out alike and")
    assert "1 seed an arm sees no difference" in power_said([], 1, spread=2.0)
    for wrong in ({"spread": 0.0}, {"difference": -1.0}):
        with pytest.raises(ValueError, match=r"--\w+ is -?\d\.0 points; a number above 0 is needed"):
            power_said([], 3, **wrong)


def test_the_pilot_is_every_record_of_the_arms_in_the_folder(tmp_path: Path) -> None:
    """Other seeds than those that are asked for count; other arms, and a result that is no number, do not."""
    records: list[tuple[str, int, float]] = [("a, b", 0, 0.1), ("a, b", 7, 0.3), ("c", 0, 0.9), ("a, b", 8, math.nan)]
    for arm, seed, value in records:
        cell = LabCell.of(arm, seed, tmp_path, {})
        cell.begin()
        cell.finish({"after": {"accuracy": value}}, ())
    options = Namespace(folder=tmp_path, seeds=[0, 1, 2], difference=None, spread=None)
    how: Any = {"run": lambda *_: {}, "report": lambda *_: ""}
    asked = Experiment(["a, b"], **how, result=lambda record: record["after"]["accuracy"], problems=lambda _: 100)
    # 0.1 and 0.3: √0.02 = 14.1 points; p = 0.2, n = 100: 4.0
    assert asked.power(asked.arms, options).startswith(
        "power: spread 14.1 points over seeds (over 2 results of 1 arms), of which the evaluation's 100 problems make "
        "up to 4.0"
    )
    assert Experiment(["a, b"], **how).power(["a, b"], options) == ""


def test_arms_at_equal_generated_tokens_by_hand() -> None:
    """The longer-winded arm has written 3,000 tokens a step, the other 1,000: at 9,000 the first has made three steps,
    the other nine. Twenty rows: running means over two of them."""
    found = {
        "short": [{"curves": {"reward": [[1000 * step, step / 10] for step in range(1, 21)]}}],
        "long": [{"curves": {"reward": [[3000, 0.4], [6000, 0.8], [9000, 1.0]]}}, {"curves": {"reward": []}}],
    }
    panels = over_tokens(found, {"paid": "reward"})
    first = [(1000, 0.1), (2000, pytest.approx(0.15)), (3000, pytest.approx(0.25))]
    assert panels["paid"]["short"][0][:3] == first
    assert at_equal_tokens(panels).splitlines() == [
        "After 9.0 k generated tokens:",
        "",
        "| arm | paid |",
        "| --- | --- |",
        "| short | 0.850 |",  # (0.8 + 0.9) / 2
        "| long | 1.000 |",
    ]
    assert at_equal_tokens({"paid": {"short": []}}) == ""
    assert math.isnan(until([(10, 1.0)], 9))
