"""Requests to stop a longer command, where no process is needed to see them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.runs import stop as stop_requests
from grpo_lab.runs.stop import StopRequests


def test_a_command_that_has_ended_is_not_asked_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look beside the work finds the stop file just as the command ends: SIGUSR1 would end the process, whose
    handlers are put back."""
    monkeypatch.setattr(stop_requests, "SECONDS_BETWEEN_LOOKS", 1e-3)
    looks, ended, asked = threading.Event(), threading.Event(), []

    class Late(StopRequests):
        def _standing(self) -> str | None:
            looks.set()
            ended.wait(600)
            return "stop file"

    before = signal.signal(signal.SIGUSR1, lambda *_: asked.append("SIGUSR1"))
    try:
        with Late(tmp_path):
            assert looks.wait(600)
            beside = next(one for one in threading.enumerate() if one.name == "stop file, max_hours")
        ended.set()
        beside.join(600)
        assert not beside.is_alive()
        assert not asked
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_beside_the_main_thread_no_handler_is_touched(tmp_path: Path) -> None:
    """A notebook's worker: signals are another's there, the stop file and the hours are looked at all the same."""
    told: list[Any] = []

    def work() -> None:
        with StopRequests(tmp_path) as stop:
            with stop.training(tmp_path / "stopped", "of") as training:
                told.append(training.asked())
            (tmp_path / "STOP").touch()
            try:
                stop.check()
            except stop_requests.Interrupted as asked:
                told.append(str(asked).partition(":")[0])

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    worker = threading.Thread(target=work)
    worker.start()
    worker.join(30)
    assert told == [None, "stop file"]
    assert handlers == {number: signal.getsignal(number) for number in handlers}
