"""What ``quiet`` silences and that it puts everything back; the line of progress."""

from __future__ import annotations

import io
import logging
import warnings
from types import SimpleNamespace

import pytest
from transformers import trainer
from transformers.trainer_callback import ProgressCallback
from transformers.utils import logging as theirs

from grpo_lab.cli import _parser
from grpo_lab.runs.console import quiet
from grpo_lab.trainer.metrics.progress import AsStock, OneLine, in_short, one_line_for


def state() -> tuple[object, ...]:
    levels = [logging.getLogger(name).level for name in ("vllm", "trl", "transformers.trainer")]
    shown = theirs.is_progress_bar_enabled()
    return trainer.DEFAULT_PROGRESS_CALLBACK, trainer.PrinterCallback, *levels, shown, list(warnings.filters)


def interrupted() -> None:
    with quiet():
        assert trainer.DEFAULT_PROGRESS_CALLBACK is OneLine
        assert not theirs.is_progress_bar_enabled()
        assert logging.getLogger("trl.trainer").getEffectiveLevel() == logging.WARNING
        assert not logging.getLogger("transformers.trainer").isEnabledFor(logging.WARNING)
        weights = logging.getLogger("transformers.modeling_utils")  # those that a checkpoint lacks
        assert weights.isEnabledFor(logging.WARNING)
        raise KeyboardInterrupt


def test_quiet_inside_and_as_before_outside() -> None:
    before = state()
    with quiet(verbose=True):
        assert state()[1:] == before[1:]
        assert issubclass(trainer.DEFAULT_PROGRESS_CALLBACK, trainer.ProgressCallback)
        assert not issubclass(trainer.DEFAULT_PROGRESS_CALLBACK, OneLine)
    assert state() == before
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert state() == before


def test_warnings_for_developers_only() -> None:
    def heard(message: str, category: type[Warning], module: str) -> int:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with quiet():
                warnings.warn_explicit(message, category, "file.py", 1, module=module)
            return len(found)

    assert heard("old", FutureWarning, "transformers.modeling_utils") == 0
    assert heard("old", FutureWarning, "team.rewards") == 1
    assert heard("your data", UserWarning, "trl.trainer.grpo_trainer") == 1
    pin = "'pin_memory' argument is set as true but no accelerator is found"
    assert heard(pin, UserWarning, "torch.utils.data.dataloader") == 0


def test_the_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    line, here = OneLine(), SimpleNamespace(is_world_process_zero=True, max_steps=3, global_step=0)
    line.on_train_begin(None, here, None)
    for step in (1, 2, 3):
        here.global_step = step
        line.on_log(None, here, None, {"loss": 0.1, "reward": 0.25 * step, "completions/mean_length": 31.7})
        line.on_step_end(None, here, None)
    line.on_log(None, here, None, {"eval_loss": 0.1, "eval_reward": 0.5, "eval_completions/mean_length": 30.2})
    line.on_log(None, here, None, {"train_runtime": 1.0})
    line.on_train_end(None, here, None)
    shown = stream.getvalue()
    assert shown.count("\n") == 2
    assert "step 3: evaluation: reward 0.5, length 30\n" in shown
    assert len(shown.split("\r")) <= 6  # nobody watches: begin, around the evaluation, end
    assert "3/3" in shown
    assert "reward 0.75, length 32" in shown
    assert in_short({"loss": 0.5, "grad_norm": 1.0}) == "loss 0.5"
    assert in_short({"reward": None}) == ""


def test_verbose_stands_before_and_after_the_command() -> None:
    for words in (["--verbose", "quickstart"], ["quickstart", "--verbose"]):
        assert _parser().parse_known_args(words)[0].verbose
    assert not _parser().parse_known_args(["quickstart"])[0].verbose


class OfATeam(ProgressCallback):
    """As a notebook's table is one."""


@pytest.mark.parametrize(
    ("given", "log_level", "found"),
    [
        (ProgressCallback, "passive", OneLine),
        (ProgressCallback, "info", ProgressCallback),
        (AsStock, "passive", AsStock),  # `--verbose`
        (OfATeam, "passive", OfATeam),
    ],
)
def test_a_teams_trainer_shows_one_line_unless_asked(given: type, log_level: str, found: type) -> None:
    callbacks = [object(), given()]
    one_line_for(
        SimpleNamespace(
            args=SimpleNamespace(log_level=log_level), callback_handler=SimpleNamespace(callbacks=callbacks)
        )
    )
    assert type(callbacks[1]) is found
