"""``max_hours``: what it may be."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.trainer.resume.stop import hours_of_this_process, started
from grpo_lab.trainer.settings.parse import LabSettings


@pytest.mark.parametrize(("written", "hours"), [(None, None), (2, 2.0), ("23.5", 23.5), (0.25, 0.25)])
def test_hours(written: Any, hours: float | None) -> None:
    assert LabSettings(max_hours=written).max_hours == hours


@pytest.mark.parametrize("written", [0, -1, True, "soon", float("nan"), float("inf"), [1]])
def test_no_hours(written: Any) -> None:
    with pytest.raises(ValueError, match=r"`max_hours` is .*; it must be a number of hours above 0"):
        LabSettings(max_hours=written)


def test_counted_from_the_start_of_the_process() -> None:
    """Its start is known to a hundredth of a second; the imports above took some."""
    assert 0 < hours_of_this_process() < 24


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_is_set_changes_no_hours_and_takes_no_request_back(
    hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set forward while a model is loaded (a machine that asks for the time after its start), it made a stop file of
    now an earlier run's."""
    file, real, before = tmp_path / "STOP", time.time, hours_of_this_process()
    file.touch()
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    StopRequests(tmp_path).heed_waiting(new=True)
    assert file.exists()
    assert abs(hours_of_this_process() - before) < 0.1
    os.utime(file, times=(1e9, 1e9))  # 2001
    StopRequests(tmp_path).heed_waiting(new=True)
    assert not file.exists()


def test_a_process_was_started_when_it_was() -> None:
    """A stop file touched a moment before belongs to an earlier run; psutil knows the second only. 0.05 s: a tick, and
    two clocks read."""
    before = time.time()
    with subprocess.Popen(["sleep", "60"]) as process:
        after = time.time()
        try:
            assert before - 0.05 <= started(process.pid) <= after + 0.05
        finally:
            process.kill()
