"""Requests to stop a longer command, where no process is needed to see them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.pipelines.open_run import OpenRun
from grpo_lab.pipelines.run_folder import RunFolder
from grpo_lab.pipelines.train import _ended_as_asked
from grpo_lab.runs import stop_requests
from grpo_lab.runs.folder import RUN, read_marker
from grpo_lab.runs.stop_requests import Interrupted, StopRequests


def test_a_command_that_has_ended_is_not_asked_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look beside the work finds the stop file just as the command ends: SIGUSR1 would end the process, whose
    handlers are put back."""
    monkeypatch.setattr(stop_requests, "SECONDS_BETWEEN_LOOKS", 1e-3)
    looks, ended, asked = threading.Event(), threading.Event(), []

    class Late(StopRequests):
        def _request_now(self) -> str | None:
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


def test_a_server_that_goes_with_a_run_that_is_asked_to_stop(tmp_path: Path) -> None:
    """A cluster's job is asked as a whole: its server ends first, and the checkpoint is there. It is gone on with as
    one that was asked (75), and not as one that lost its server (3)."""
    stop = SimpleNamespace(reason="SIGTERM", broke_off_a_wait=None)
    accelerator = SimpleNamespace(wait_for_everyone=lambda: None, is_main_process=True)
    trainer = SimpleNamespace(
        stop_request=stop, accelerator=accelerator, state=SimpleNamespace(global_step=2),
        exact_update=SimpleNamespace(budget=SimpleNamespace(described=dict)),
    )  # fmt: skip
    run = OpenRun(RunFolder(tmp_path, {}, ""), {"exact_update": {}}, None)
    with (
        pytest.raises(Interrupted, match="SIGTERM: stopped at step 2"),
        _ended_as_asked(trainer, run),
    ):
        raise ServerGone("it went. A checkpoint of step 2 was written")
    assert read_marker(tmp_path / RUN)["interrupted"] == {"signal": "SIGTERM", "step": 2}
    stop.reason = None
    with pytest.raises(ServerGone, match="it went"), _ended_as_asked(trainer, run):
        raise ServerGone("it went")
