"""Asked to stop in generation, scoring, update, saving or evaluation: the checkpoint that follows resumes to the
bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from grpo_lab import KimiTrainer, LabConfig, LabTrainer
from grpo_lab.trainer.resume.stop import remove
from parity.harness import problems
from training.test_resume import TWO_ITERATIONS, TWO_STEPS, assert_same, build, history, inside, prompts_seen

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {**TWO_STEPS, "objective": "dapo"}


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def in_call(trainer: Any, method: str, number: int, act: Callable[[], None] = sigterm) -> None:
    """``act`` when ``method`` is called the ``number``-th time, in the middle of what it does."""
    stock, calls = getattr(trainer, method), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            act()
        return stock(*args, **kwargs)

    setattr(trainer, method, counted)


class At(TrainerCallback):  # type: ignore[misc]
    """``act`` when ``event`` comes, ``step`` optimizer steps done before it."""

    def __init__(self, event: str, step: int, act: Callable[[], None] = sigterm) -> None:
        def acting(_args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == step:
                act()

        setattr(self, event, acting)


def ready(folder: Path, kind: Any = LabTrainer, **changes: Any) -> Any:
    """Stopped by SIGTERM its ``train`` returns, and checkpoints come on request only."""
    return build(folder, kind, **{"enable_jit_checkpoint": True, "save_strategy": "no", **changes})


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = build(tmp_path_factory.mktemp("of") / "whole", **SETTINGS)
    trainer.train()
    return trainer


#: two steps a generation: the second generation is in step 3
MOMENTS: dict[str, Callable[[Any], None]] = {
    "generation": lambda trainer: in_call(trainer, "_generate_single_turn", 2),
    "scoring": lambda trainer: in_call(trainer, "_calculate_rewards", 2),
    "collecting": lambda trainer: trainer.add_callback(At("on_substep_end", 2)),
    "before the optimizer's step": lambda trainer: trainer.add_callback(At("on_pre_optimizer_step", 2)),
    "after the optimizer's step": lambda trainer: trainer.add_callback(At("on_optimizer_step", 2)),
    "between two steps": lambda trainer: trainer.add_callback(At("on_log", 2)),
}


@pytest.mark.thorough(but=["generation", "collecting", "between two steps"])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_run_stopped_by_sigterm_goes_on_to_the_bit(moment: str, whole: Any, tmp_path: Path) -> None:
    stopped = ready(tmp_path / "stopped", **SETTINGS)
    MOMENTS[moment](stopped)
    stopped.train()
    place = tmp_path / "stopped" / "checkpoint-3"
    assert saved(tmp_path / "stopped") == [place.name]
    assert inside(place)
    assert (stopped.state.global_step, stopped.parts.stop.reason) == (3, "SIGTERM")
    again = build(tmp_path / "again", **SETTINGS)
    again.train(resume_from_checkpoint=str(place))
    assert_same(again, whole)
    assert history(stopped)[:3] == history(whole)[:3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_asked_while_a_checkpoint_is_written_it_is_the_one(whole: Any, tmp_path: Path) -> None:
    """HF's next event came in the step after it."""
    stopped = ready(tmp_path / "stopped", **SETTINGS, save_strategy="steps", save_steps=2)
    in_call(stopped, "_save_rng_state", 1)
    stopped.train()
    assert saved(tmp_path / "stopped") == ["checkpoint-2"]
    assert stopped.state.global_step == 2
    again = build(tmp_path / "again", **SETTINGS)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-2"))
    assert_same(again, whole)


@pytest.mark.thorough(but="LabTrainer")
@pytest.mark.parametrize("kind", [LabTrainer, KimiTrainer])
def test_where_a_generation_begins_in_the_step(kind: Any, tmp_path: Path) -> None:
    """Step 3 generates: a checkpoint inside it would generate again with other random numbers. An odd logging window,
    too."""
    settings: dict[str, Any] = {**TWO_ITERATIONS, "logging_steps": 2, "max_steps": 6}
    if kind is LabTrainer:
        settings["objective"] = "grpo"
    whole = build(tmp_path / "whole", kind, **settings)
    whole.train()
    stopped = ready(tmp_path / "stopped", kind, **settings)
    stopped.add_callback(At("on_pre_optimizer_step", 2))
    stopped.train()
    again = build(tmp_path / "again", kind, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    assert_same(again, whole)
    assert prompts_seen(again) == prompts_seen(whole)[2:]


@pytest.mark.parametrize("best", [False, True])
def test_an_evaluation_that_is_due_is_left_out_and_one_under_way_is_the_last(best: bool, tmp_path: Path) -> None:
    """Where only the best are saved (``save_strategy: best``), the evaluation's word is not the last one."""
    for name, event, step, expected in (
        ("due", "on_optimizer_step", 1, False),
        ("under way", "on_prediction_step", 2, True),
    ):
        trainer = ready(tmp_path / name, **SETTINGS)
        trainer.eval_dataset, trainer.args.eval_strategy, trainer.args.eval_steps = (
            problems(4),
            IntervalStrategy.STEPS,
            2,
        )
        if best:
            trainer.args.save_strategy, trainer.args.metric_for_best_model = SaveStrategy.BEST, "loss"
            trainer.args.greater_is_better = True
            trainer.add_callback(At("on_step_begin", 1, lambda state=trainer: setattr(state.state, "best_metric", 1e9)))
        trainer.add_callback(At(event, step))
        trainer.train()
        assert trainer.state.global_step == 2
        assert (tmp_path / name / "checkpoint-2" / "trainer_state.json").is_file()
        assert any("eval_loss" in row for row in trainer.state.log_history) == expected


def evaluated(folder: Path, **changes: Any) -> Any:
    """Evaluates every two steps."""
    trainer = ready(folder, **{**SETTINGS, **changes})
    trainer.eval_dataset, trainer.args.eval_steps = problems(4), 2
    trainer.args.eval_strategy = IntervalStrategy.STEPS
    return trainer


def test_an_evaluation_that_was_due_is_made_up(tmp_path: Path) -> None:
    """It draws from training's random numbers, so without it all later completions would be others."""
    whole = evaluated(tmp_path / "whole")
    whole.train()
    folder = tmp_path / "stopped"
    stopped = evaluated(folder)
    stopped.add_callback(At("on_optimizer_step", 1))
    stopped.train()
    assert not any("eval_loss" in row for row in stopped.state.log_history)
    again = evaluated(folder)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_same(again, whole)
    assert [row["step"] for row in again.state.log_history] == [row["step"] for row in whole.state.log_history]


def by_epochs(folder: Path, **changes: Any) -> Any:
    """Evaluates at the end of each epoch: two steps."""
    trainer = ready(folder, rows=4, **{**SETTINGS, **changes})
    trainer.eval_dataset, trainer.args.eval_strategy = problems(4), IntervalStrategy.EPOCH
    return trainer


@pytest.fixture(scope="module")
def whole_by_epochs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three epochs of two steps, a checkpoint after each step (saving changes nothing: ``test_resume``)."""
    trainer = by_epochs(tmp_path_factory.mktemp("of") / "whole", save_strategy="steps", save_steps=1)
    trainer.train()
    return trainer


@pytest.mark.thorough(but=["steps-on_save-4", "steps-None-4"])
@pytest.mark.parametrize(
    ("saving", "event", "step"),
    [
        ("no", "on_optimizer_step", 3),  # asked inside the epoch's last step
        ("steps", "on_save", 4),  # its checkpoint is there already, and says of no evaluation
        ("steps", "on_epoch_end", 4),
        ("steps", None, 4),  # nobody asked: killed after that checkpoint, before the evaluation
        ("epoch", "on_prediction_step", 4),
        ("epoch", "on_optimizer_step", 2),  # an epoch's first step
    ],
)
def test_an_epochs_evaluation_is_made_up_before_the_next_epoch_draws(
    saving: str, event: str | None, step: int, whole_by_epochs: Any, tmp_path: Path
) -> None:
    """The next epoch's data loader draws from the random numbers that the evaluation has moved on."""
    whole = whole_by_epochs
    assert [row["epoch"] for row in whole.state.log_history if "eval_loss" in row] == [1.0, 2.0, 3.0]
    settings: dict[str, Any] = {"save_strategy": saving, "save_steps": 1}
    folder, at = tmp_path / "stopped", step
    if event is None:
        shutil.copytree(Path(whole.args.output_dir) / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    else:
        stopped = by_epochs(folder, **settings)
        stopped.callback_handler.callbacks.insert(0, At(event, step))
        stopped.train()
        at = stopped.state.global_step
    again = by_epochs(folder, **settings)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{at}"))
    assert_same(again, whole)
    assert [row["step"] for row in again.state.log_history] == [row["step"] for row in whole.state.log_history]


def test_at_its_last_step_nothing_is_trained_and_a_due_evaluation_is_made(whole_by_epochs: Any, tmp_path: Path) -> None:
    """transformers made a seventh step, and another at each resume."""
    stopped = by_epochs(tmp_path / "stopped")
    stopped.add_callback(At("on_optimizer_step", 5))
    stopped.train()
    place = tmp_path / "stopped" / "checkpoint-6"
    told: list[str] = []

    class Told(TrainerCallback):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_") and name not in told:
                told.append(name)
            return super().__getattribute__(name)

    again = by_epochs(tmp_path / "stopped")
    again.add_callback(Told())
    ended = again.train(resume_from_checkpoint=str(place))
    assert_same(again, whole_by_epochs)
    assert (ended.global_step, again.state.global_step) == (6, 6)
    loss = whole_by_epochs.state.log_history[-1]["train_loss"]
    assert ended.training_loss == pytest.approx(loss, rel=1e-5)  # sums of six float32
    assert {"on_train_begin", "on_evaluate", "on_log", "on_train_end"} <= set(told)
    assert not {"on_epoch_begin", "on_step_begin"} & set(told)
    longer = by_epochs(tmp_path / "stopped", max_steps=8)
    longer.train(resume_from_checkpoint=str(place))
    assert longer.state.global_step == 8


def test_a_stop_file_and_the_hours(tmp_path: Path) -> None:
    """Also where no checkpoints are asked for, and no signal is heard; the file goes, or a resumed run would stop at
    once."""
    by_file = build(tmp_path / "file", **SETTINGS, save_strategy="no")
    by_file.add_callback(At("on_substep_end", 1, lambda: (tmp_path / "file" / "STOP").touch()))
    by_file.train()
    assert (by_file.state.global_step, by_file.parts.stop.reason) == (2, "stop file")
    assert not (tmp_path / "file" / "STOP").exists()
    assert saved(tmp_path / "file") == ["checkpoint-2"]
    elsewhere = tmp_path / "here"
    elsewhere.touch()
    named = build(tmp_path / "named", **SETTINGS, save_strategy="no", stop_file=str(elsewhere))
    named.train()
    assert named.state.global_step == 1
    assert not elsewhere.exists()
    by_hours = build(tmp_path / "hours", **SETTINGS, save_strategy="no", max_hours=1e-6)
    by_hours.train()
    assert (by_hours.state.global_step, by_hours.parts.stop.reason) == (1, "max_hours")


def test_a_stop_file_of_an_earlier_run_stops_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It came after its run had ended; one that cannot be removed is said."""
    file = tmp_path / "run" / "STOP"
    trainer = build(tmp_path / "run", **{**SETTINGS, "max_steps": 2}, save_strategy="no")
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.utime(file, (1e9, 1e9))  # 2001
    trainer.train()
    assert (trainer.state.global_step, trainer.parts.stop.reason) == (2, None)
    assert not file.exists()
    assert f"{file} is older than this run" in caplog.text
    file.mkdir()
    remove(file)
    assert f"the stop file {file} cannot be removed" in caplog.text


@pytest.mark.parametrize("written", ["", ".", 3])
def test_a_stop_file_is_a_file(written: Any, tmp_path: Path) -> None:
    """A folder is always there: the run would have stopped after its first step, by a traceback."""
    with pytest.raises(
        ValueError, match=r"`stop_file` is .*; it must be the path of a file, there or not yet, or left"
    ):
        LabConfig(str(tmp_path), stop_file=written, use_cpu=True, bf16=False)


def test_without_hfs_switch_the_process_ends_by_the_signal_one_checkpoint_later(tmp_path: Path) -> None:
    """A handler of the script's gets it as it would have."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        trainer = build(tmp_path / "run", **SETTINGS, save_strategy="steps", save_steps=50)
        trainer.add_callback(At("on_substep_end", 1, lambda: (sigterm(), sigterm())))  # twice is once
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert saved(tmp_path / "run") == ["checkpoint-2"]


def test_the_end_of_a_stopped_run_leaves_its_checkpoint(tmp_path: Path) -> None:
    """HF removes all but the best there (``save_total_limit: 1``), and may load the best."""
    trainer = ready(tmp_path / "run", **SETTINGS, save_strategy="steps", save_steps=1, save_total_limit=1)

    def best() -> None:
        trainer.state.best_model_checkpoint = str(tmp_path / "run" / "checkpoint-1")

    trainer.add_callback(At("on_step_begin", 1, best))
    trainer.add_callback(At("on_substep_end", 1))
    trainer.train()
    assert saved(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
