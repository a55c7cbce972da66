"""An evaluation that was due at the step after which a run stopped on request: the resumed run makes it up before its first step.

It would have come before the checkpoint and drawn from training's random numbers. A scheduler does not wait for an evaluation, so the
checkpoint comes first and says that one is due; the resumed run evaluates as soon as it has the checkpoint's random numbers (at the
end of an epoch that is before the next one's data loader draws from them), and goes on as the uninterrupted one did.

The same of ``eval_strategy: epoch``, whose evaluation comes when the last step's checkpoint (``save_strategy: steps``) is written
already: that checkpoint, too, says that one is due, for a run that is killed after it.
"""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_lab.atomic import write_whole_text

if TYPE_CHECKING:
    from trl import GRPOTrainer

FILE = "grpo_lab_evaluation_due.json"


class DueEvaluation(TrainerCallback):  # type: ignore[misc]
    """One for a trainer; comes before all other callbacks.

    Limit: where the evaluation itself ends the training (early stopping) one more step is made.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = weakref.ref(trainer)
        self.left_out = False
        self._loaded = False
        self._made_at = -1  # the last step after which there was an evaluation

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._made_at = -1 if self._loaded else state.global_step  # of a checkpoint that says of none

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._made_at = state.global_step

    def leave_out_the_epochs(self, args: Any, state: Any) -> bool:
        """At the last step of an epoch: ``eval_strategy: epoch`` would have one when the step is over. Whether it is left out."""
        found = self._epochs_is_ahead(args, state)
        self.left_out |= found
        return found

    def _epochs_is_ahead(self, args: Any, state: Any) -> bool:
        """``eval_strategy: epoch`` at the end of an epoch, which the run's last step ends, too; not made yet."""
        over = state.epoch is not None and (_is_whole(state.epoch) or state.global_step >= state.max_steps)
        return _by_epoch(args) and over and args.eval_delay <= state.epoch and self._made_at != state.global_step

    def leave_out(self, control: Any) -> None:
        """Whatever is due at this step comes after the resume."""
        self.left_out, control.should_evaluate = self.left_out or bool(control.should_evaluate), False

    def save(self, folder: str | os.PathLike[str]) -> None:
        """That one is due, into a checkpoint folder; nothing where none is."""
        trainer = self._trainer()
        if trainer is None or not trainer.args.should_save:
            return
        if self.left_out or self._epochs_is_ahead(trainer.args, trainer.state):
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_whole_text(Path(folder) / FILE, json.dumps({"format": 1, "step": trainer.state.global_step}))

    def load(self, checkpoint: str | None) -> None:
        """Whether ``save`` wrote it; the same on every rank, which all come here."""
        here = checkpoint is not None and (Path(checkpoint) / FILE).is_file()
        self.left_out, self._loaded = False, any(gather_object([here]))

    def make_up(self) -> None:
        """Where the checkpoint says that one is due; its random numbers have just been loaded."""
        loaded, self._loaded = self._loaded, False
        trainer = self._trainer()
        if trainer is None:
            return
        args, state = trainer.args, trainer.state
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        if not loaded or trainer.eval_dataset is None or strategy == "no":
            return
        if _by_epoch(args) and not _is_whole(state.epoch) and state.global_step < state.max_steps:
            return  # the last step of a run that is longer now
        trainer.recorder.say(f"the evaluation that was due after step {state.global_step} is made up")
        metrics = trainer._evaluate(None, None)
        best = trainer._determine_best_metric(metrics=metrics, trial=None)
        place = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if best and os.path.exists(place):
            state.best_model_checkpoint = place


def _by_epoch(args: Any) -> bool:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "epoch"


def _is_whole(epoch: float) -> bool:
    return epoch == int(epoch)


__all__ = ["FILE", "DueEvaluation"]
