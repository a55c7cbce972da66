"""Later code gives the numbers that were recorded: losses, gradient norms, every metric and the way of the weights.

The record is renewed only where a number changes on purpose (``python tests/golden/record.py``; the changelog says
which and why).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from golden.record import RECORD, machine, run_all, run_in_world
from golden.settings import SETTINGS, STEPS

pytestmark = pytest.mark.slow

#: Of a value and of the terms it is a mean of (advantages, ratios and rewards here are of size 1): log-probs are
#: rounded to float32 by TRL's head (6e-8 of a value of size ≤ 8, so 5e-7 in a single ratio), and hundreds of them are
#: averaged.
TOLERANCE = 1e-6

RECORDED: dict[str, Any] = json.loads(RECORD.read_text())


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("golden")
    records = run_all([setting.name for setting in SETTINGS if setting.processes == 1], folder)
    for processes in sorted({setting.processes for setting in SETTINGS} - {1}):
        names = [setting.name for setting in SETTINGS if setting.processes == processes]
        records |= run_in_world(processes, names, folder)
    return records


def differences(ours: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """What differs by more than the tolerance, in words."""
    wrong = []
    for step, (row, then) in enumerate(zip(ours["steps"], recorded["steps"], strict=True)):
        wrong += [f"step {step}: {name} is there once only" for name in row.keys() ^ then.keys()]
        for name in row.keys() & then.keys():
            if not math.isclose(row[name], then[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                wrong.append(f"step {step}: {name} {row[name]!r}, recorded {then[name]!r}")
    scale = recorded["moved"]
    for name, value, then in (
        ("moved", ours["moved"], recorded["moved"]),
        *(("towards", a, b) for a, b in zip(ours["towards"], recorded["towards"], strict=True)),
    ):
        # a projection on a direction of unit variance; 4 standard deviations
        if abs(value - then) > 4 * TOLERANCE * scale:
            wrong.append(f"weights: {name} {value!r}, recorded {then!r}")
    return wrong


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS])
def test_as_recorded(name: str, found: dict[str, Any]) -> None:
    recorded = RECORDED["settings"][name]
    assert len(recorded["steps"]) == STEPS
    assert recorded["moved"] > 1e-3, "hardly trained: nothing is compared"
    assert differences(found[name], recorded) == []
    if machine() == RECORDED["machine"]:
        assert found[name]["sha256"] == recorded["sha256"], "on the machine of the record: to the last bit"


@pytest.mark.parametrize(
    ("one", "two"), [("dr_grpo", "ranks_dr_grpo"), ("process", "ranks_process"), ("drop_in_dapo", "ranks_drop_in")]
)
def test_two_ranks_train_as_one(one: str, two: str, found: dict[str, Any]) -> None:
    """The same rows in every step. Float64: only the order of additions differs."""
    alone, together = found[one], found[two]
    for name in ("moved", "towards"):
        assert together[name] == pytest.approx(alone[name], abs=1e-9 * alone["moved"])


def test_a_change_in_the_sixth_digit_is_seen() -> None:
    recorded = RECORDED["settings"]["grpo"]
    loss = recorded["steps"][3]["loss"]
    changed = [dict(row) for row in recorded["steps"]]
    changed[3]["loss"] = loss + 3e-6 * max(1.0, abs(loss))
    assert differences({**recorded, "steps": changed}, recorded)
    assert differences({**recorded, "moved": recorded["moved"] * (1 + 1e-5)}, recorded)
    assert not differences(recorded, recorded)


def test_every_setting_is_recorded_and_small() -> None:
    assert set(RECORDED["settings"]) == {setting.name for setting in SETTINGS}
    assert len(SETTINGS) >= 18
    assert Path(RECORD).stat().st_size < 400_000
