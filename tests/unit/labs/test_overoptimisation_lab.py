"""The over-optimisation lab: what a record says, by hand, and every part of it in small."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.cli import main
from grpo_lab.labs.overoptimisation import JUDGES, KL, LAST, PAID, PROXY, TRUTH, measured

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"samples": {"right_share": 0.25}, "pairs": {"wrong": 30, "rows": 150, "ties": 30}, "policy": {"accuracy": 0.5}}


def row(kl: float, truth: float, proxy: float) -> dict[str, float]:
    return {KL: kl, TRUTH: truth, PROXY: proxy, "completions/mean_length": 9.0}


def test_a_record_by_hand() -> None:
    """Truth is 0.25 + d·(0.4 − 0.2·log d) at d = 0, 0.1, …, 2.9; α/β − 1 = 1: the peak is at d = e, 0.2·e above."""
    places = [0.1 * n for n in range(30)]
    log = [row(d * d, 0.25 + (d * (0.4 - 0.2 * math.log(d)) if d else 0.0), 2.0 + d) for d in places]
    log[0][KL] = -1e-9  # an estimate beside the start
    found = measured(log, FACTS, PROXY)
    after = found["after"]
    assert found["before"] == {"truth": 0.25}
    assert (after["α"], after["β"]) == pytest.approx((0.4, 0.2), abs=1e-9)
    assert (after["√KL at the law's peak"], after["truth gained there"]) == pytest.approx((math.e, 0.2 * math.e), 1e-6)
    assert after["√KL"] == pytest.approx(2.45)  # mean of 2.0 … 2.9
    assert after["proxy gained"] == pytest.approx(2.45)
    assert after["truth"] == pytest.approx(sum(one[TRUTH] for one in log[-LAST:]) / LAST)
    assert (after["wrong labels"], after["greedy"]) == (0.25, 0.5)  # 30 of 150 - 30
    assert found["curves"]["truth, Gao's law"][7][1] == pytest.approx(log[7][TRUTH])
    assert [distance for distance, _ in found["curves"]["tokens"]] == pytest.approx(places)


def test_most_truth_is_of_ten_steps_on_the_way() -> None:
    """It rises to 0.9 for ten steps and falls to 0.1: most 0.9, at the end 0.1. A form has no labels."""
    values = [0.3] * 5 + [0.9] * 10 + [0.1] * 15
    log = [row(0.1 * n, value, 0.0) for n, value in enumerate(values)]
    after = measured(log, {"samples": FACTS["samples"], "policy": {}}, PROXY)["after"]
    assert (after["most truth"], after["truth"]) == (pytest.approx(0.9), pytest.approx(0.1))
    assert math.isnan(after["wrong labels"])
    assert math.isnan(after["greedy"])


def test_a_run_that_did_not_move_has_no_law() -> None:
    """All of a group were paid alike at every step: a record, and dashes in the table."""
    found = measured([row(0.0, 0.2, 1.0)] * 5, FACTS, PROXY)
    assert all(math.isnan(found["after"][name]) for name in ("α", "β", "√KL at the law's peak", "truth gained there"))
    assert (found["after"]["truth"], found["after"]["√KL"]) == (pytest.approx(0.2), 0.0)
    assert found["curves"]["truth, Gao's law"] == []
    with pytest.raises(ValueError, match="got 2"):
        measured([row(0.1, 0.2, 1.0)] * 2, FACTS, PROXY)


SMALL: dict[str, Any] = {
    "stages.0.data.n": 64, "stages.0.max_steps": 2, "stages.1.data.n": 12, "stages.1.n_samples": 4,
    "stages.1.max_completion_length": 8, "stages.3.max_steps": 2, "stages.4.max_steps": 4,
    "stages.4.max_completion_length": 8, "stages.4.per_device_train_batch_size": 8, "stages.4.num_generations": 4,
    "stages.4.evaluation.data.n": 4,
}  # fmt: skip


@pytest.mark.not_fast
def test_a_new_folder_is_planned_and_a_slip_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The start that the cells read is not there yet."""
    command = ["lab", "overoptimisation", "--folder", str(tmp_path / "out"), "--arms", "people", "form", "--dry-run"]
    assert main(command) == 0
    assert "people, seed 0" in capsys.readouterr().out
    assert main([*command, "--set", "stages.4.max_stes", "4"]) == 2
    assert "did you mean 'max_steps'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_runs_every_kind_of_arm_and_repeats_nothing(tmp_path: Path) -> None:
    """A model of two steps is never right, so that a judge without noise has nothing to say: people have."""
    arms = ["people", *PAID]
    assert {*arms} < {*JUDGES, *PAID}
    command = [sys.executable, "-m", "grpo_lab", "lab", "overoptimisation", "--folder", str(tmp_path), "--seeds", "0"]
    command += ["--arms", *arms, *(word for key, value in SMALL.items() for word in ("--set", key, json.dumps(value)))]
    how: Any = {"capture_output": True, "text": True, "timeout": 1800, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    first = subprocess.run(command, **how)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    assert all(f"| {arm} |" in (tmp_path / "table.md").read_text() for arm in arms)
    assert (tmp_path / "curves.png").is_file()
    people = json.loads((tmp_path / "people-0" / "arm.json").read_text())
    assert len(people["curves"]["proxy"]) == 4
    assert people["curves"]["proxy"][-1][0] > 0
    truth = json.loads((tmp_path / "truth-0" / "arm.json").read_text())
    assert truth["curves"]["proxy"] == truth["curves"]["truth"]
    again = subprocess.run(command, **how)
    assert again.returncode == 0
    assert "people, seed 0 ..." not in again.stdout
