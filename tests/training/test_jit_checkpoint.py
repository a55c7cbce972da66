"""SIGTERM with HF's `enable_jit_checkpoint`: the resumed run is the uninterrupted one to the bit, whenever the signal came."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import IntervalStrategy

from grpo_lab import KimiTrainer, LabTrainer
from parity.harness import problems
from training.test_resume import TWO_ITERATIONS, TWO_STEPS, assert_same, build, history, inside, prompts_seen

pytestmark = pytest.mark.slow


def sigterm(trainer: Any) -> None:
    """The real signal, and the moment at which HF has taken notice of it."""
    found = (each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
    manager = next(found).jit_manager
    manager.kill_wait = 0
    os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + 20
    while not manager.is_checkpoint_requested and time.monotonic() < until:
        time.sleep(0.01)
    assert manager.is_checkpoint_requested


class SigtermAt(TrainerCallback):  # type: ignore[misc]
    """Sends it when ``event`` comes in step ``step`` (optimizer steps done before it)."""

    def __init__(self, event: str, step: int) -> None:
        self.trainer: Any = None

        def send(_args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == step:
                sigterm(self.trainer)

        setattr(self, event, send)


def interrupted(folder: Path, event: str, step: int, kind: Any, settings: dict[str, Any]) -> Any:
    trainer = build(folder, kind, **settings, enable_jit_checkpoint=True, save_strategy="no")
    sender = SigtermAt(event, step)
    sender.trainer = trainer
    trainer.add_callback(sender)
    trainer.train()
    return trainer


#: where the signal comes: its event, the steps done by then, the checkpoint that must follow
MOMENTS = {
    "while a step is collected": ("on_substep_end", 2, 3),
    "before the optimizer's step": ("on_pre_optimizer_step", 2, 3),
    "after the optimizer's step": ("on_optimizer_step", 2, 3),
    "between two steps": ("on_log", 3, 3),
}


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_run_stopped_by_sigterm_goes_on_to_the_bit(moment: str, tmp_path: Path) -> None:
    event, step, stop = MOMENTS[moment]
    settings: dict[str, Any] = {**TWO_STEPS, "objective": "dapo"}
    whole = build(tmp_path / "whole", **settings)
    whole.train()
    stopped = interrupted(tmp_path / "stopped", event, step, LabTrainer, settings)
    place = tmp_path / "stopped" / f"checkpoint-{stop}"
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == [place.name]
    assert inside(place)
    assert not (place / "checkpoint-is-incomplete.txt").exists()
    assert stopped.state.global_step == stop
    again = build(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(place))
    assert_same(again, whole)
    assert history(stopped)[:stop] == history(whole)[:stop]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("kind", [LabTrainer, KimiTrainer])
def test_where_a_generation_begins_in_the_step(kind: Any, tmp_path: Path) -> None:
    """Step 3 generates: a checkpoint inside it would generate again with other random numbers. An odd logging window, too."""
    settings: dict[str, Any] = {**TWO_ITERATIONS, "logging_steps": 2, "max_steps": 6}
    if kind is LabTrainer:
        settings["objective"] = "grpo"
    whole = build(tmp_path / "whole", kind, **settings)
    whole.train()
    interrupted(tmp_path / "stopped", "on_pre_optimizer_step", 2, kind, settings)
    again = build(tmp_path / "again", kind, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    assert_same(again, whole)
    assert prompts_seen(again) == prompts_seen(whole)[2:]


def test_an_evaluation_that_is_due_does_not_keep_the_scheduler_waiting(tmp_path: Path) -> None:
    trainer = build(tmp_path / "stopped", **TWO_STEPS, objective="dapo", enable_jit_checkpoint=True, save_strategy="no")
    trainer.eval_dataset, trainer.args.eval_strategy, trainer.args.eval_steps = problems(4), IntervalStrategy.STEPS, 3
    sender = SigtermAt("on_optimizer_step", 2)
    sender.trainer = trainer
    trainer.add_callback(sender)
    trainer.train()
    assert (tmp_path / "stopped" / "checkpoint-3" / "trainer_state.json").is_file()
    assert not any("eval_loss" in row for row in trainer.state.log_history)
