"""Killed with −9 at seven points of a saving, and with a full disk: the newest checkpoint is whole, and resumes to the
bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forked
from training.saving_worker import POINTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("saving")
    done = forked.run([str(Path(__file__).with_name("saving_worker.py")), str(out)])
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def assert_same(again: dict[str, Any], whole: dict[str, Any]) -> None:
    assert again["weights"] == whole["weights"]
    assert again["history"] == whole["history"]
    assert len(whole["history"]) == 5
    assert again["folders"] == whole["folders"] == ["checkpoint-4", "checkpoint-5"]


@pytest.mark.parametrize("point", list(POINTS))
def test_killed_while_saving(point: str, report: dict[str, Any]) -> None:
    found, moved = report[point], point == "before the pruning"
    assert found["ended"] == -9
    assert found["newest"] == found["transformers' newest"] == ("checkpoint-3" if moved else "checkpoint-2")
    assert found["passed over"] == []
    assert found["folders"] == (
        ["checkpoint-1", "checkpoint-2", "checkpoint-3"] if moved else ["_saving", "checkpoint-1", "checkpoint-2"]
    )
    assert_same(found["again"], report["whole"])


def test_a_full_disk(report: dict[str, Any]) -> None:
    """Old checkpoints stay: they are pruned when the new one is whole."""
    found = report["full disk"]
    assert "checkpoint-3 could not be written (" in found["said"]
    assert ("No space left on device" if found["mounted"] else "File too large") in found["said"] or "fail" in found[
        "said"
    ]
    assert "the newest whole one is " in found["said"]
    assert "checkpoint-2. Mend that" in found["said"]
    assert found["folders"] == ["checkpoint-1", "checkpoint-2"]
    assert_same(found["again"], report["whole"])
