"""Trackers (``report_to``): a run for each training, gone on with by a resume; one that fails does not end a training.

No tracker is installed here: their callbacks are stood in for under names that transformers knows."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import read
from grpo_lab.stages.supervised import Train
from grpo_lab.trainer.metrics import trackers
from grpo_lab.trainer.metrics.trackers import tracked

SETTINGS = {
    "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "bf16": False, "use_cpu": True,
    "report_to": "flyte",
}  # fmt: skip


class Failing(TrainerCallback):  # type: ignore[misc]
    """Fails at an event of its choice."""

    at, heard = "on_log", list[str]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.hear("on_train_begin")

    def on_log(self, *_: Any, **__: Any) -> None:
        self.hear("on_log")

    def hear(self, event: str) -> None:
        self.heard.append(event)
        if event == self.at:
            raise RuntimeError("the server is gone")


def train(model: Path, folder: Path) -> Any:
    (folder / "stage").mkdir()
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1?", "completion": " 2"}\n' * 6)
    stage = read(Train, {"model": str(model), "rows": str(folder / "rows.jsonl"), **SETTINGS}, "stages.sft")
    return stage.run(Workspace(folder / "stage", StopRequests(folder)))


@pytest.mark.not_fast
def test_a_tracker_that_fails_in_the_middle_is_left_out_of_a_training_that_goes_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "flyte", Failing)
    monkeypatch.setattr(Failing, "heard", [])
    with caplog.at_level(logging.WARNING, "grpo_lab"):
        assert train(tiny_folder, tmp_path)["steps"] == 3
    assert (tmp_path / "stage" / "metrics.jsonl").read_text().count("\n") == 3
    assert (tmp_path / "stage" / "model" / "config.json").is_file()
    assert Failing.heard == ["on_train_begin", "on_log"]
    [said] = [one.getMessage() for one in caplog.records if "report_to" in one.getMessage()]
    assert "flyte" in said
    assert "RuntimeError: the server is gone" in said


@pytest.mark.not_fast
def test_a_tracker_that_cannot_begin_is_one_sentence(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "flyte", type("Unready", (Failing,), {"at": "on_train_begin"}))
    with pytest.raises(ValueError, match="`report_to` names 'flyte', which cannot begin: RuntimeError: the server"):
        train(tiny_folder, tmp_path)


class Board(TrainerCallback):  # type: ignore[misc]
    """As transformers' callback of tensorboard."""

    logging_dir, tb_writer, made = None, None, list[tuple[str, int | None]]()

    def _SummaryWriter(self, place: str, purge_step: int | None) -> Any:
        self.made.append((place, purge_step))
        return SimpleNamespace(close=lambda: None)


def begin(kind: type, folder: Path, step: int, name: str | None = None) -> Any:
    """The callback after a training in ``folder`` has begun at ``step``, and has ended."""
    callback = kind()
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[callback]))
    state = SimpleNamespace(is_world_process_zero=True, global_step=step)
    with tracked(trainer, folder):
        trainer.callback_handler.callbacks[0].on_train_begin(SimpleNamespace(run_name=name), state, None)
    return callback


def test_a_resume_goes_on_with_the_curve_and_a_new_training_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Board)
    monkeypatch.setattr(Board, "made", [])
    for folder, step in (("one", 0), ("one", 3), ("two", 0), ("one", 0)):
        begin(Board, tmp_path / folder, step)
    (first, _), (again, purged), (other, _), (anew, _) = Board.made
    assert (again, purged) == (first, 4)
    assert Path(first).parent == tmp_path / "one" / "runs"
    assert Path(other).parent == tmp_path / "two" / "runs"
    assert anew != first


@pytest.mark.parametrize(("record", "why"), [('{"ru', "not JSON"), ('{"run": 3}', "its `run` is 3; it must be text")])
def test_a_damaged_record_of_the_run_is_named(
    record: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curve went on in a second run, without a word."""
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Board)
    (tmp_path / "trackers.json").write_text(record)
    with pytest.raises(ValueError, match=rf"'tensorboard', which cannot begin: .*trackers\.json.*{why}.*: remove it"):
        begin(Board, tmp_path, 3)
    begin(Board, tmp_path, 0)  # a new training


def test_wandb_has_a_run_for_each_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainings of one process; a run that a team has opened itself is used, and left open."""
    opened: list[dict[str, Any]] = []
    wandb = SimpleNamespace(run=None)

    def init(**given: Any) -> Any:
        opened.append(given)
        wandb.run = SimpleNamespace(finish=lambda: setattr(wandb, "run", None))
        return wandb.run

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    wandb.init = init
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "wandb", TrainerCallback)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for folder, step, name in (("start", 0, None), ("rl", 0, None), ("rl", 2, None), ("rl", 0, "mine")):
        begin(TrainerCallback, tmp_path / "out" / folder, step, name)
        assert wandb.run is None
    start, rl, gone_on, mine = opened
    assert [one["name"] for one in opened] == ["out/start", "out/rl", "out/rl", "mine"]
    assert rl["id"] == gone_on["id"]
    assert len({start["id"], rl["id"], mine["id"]}) == 3
    wandb.run = "a team's"
    begin(TrainerCallback, tmp_path / "out" / "rl", 0)
    assert wandb.run == "a team's"
    assert len(opened) == 4


def test_trackio_knows_a_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class Tracks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            names.append(args.run_name)

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "trackio", Tracks)
    for step in (0, 5, 0):
        begin(Tracks, tmp_path / "out" / "rl", step)
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("out/rl-") for name in names)
    assert (tmp_path / "out" / "rl" / trackers.FILE).is_file()
