"""Stop a supervised or preference training inside a longer command on request: write a checkpoint after the current
step, and continue from it later, to the bit.

The trainers of ``methods.py`` write no checkpoint by themselves (``save_strategy: no``). On a request to stop, the
current step ends and is logged. Then transformers' checkpoint goes into the folder ``place``, whole or not at all. What
transformers does not save stands in it as the entry ``training`` of our record (``resume/state.py``). The same
training, begun again, continues from there. A training with other rows, other settings or another model begins anew.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from grpo_lab.finite import NumbersError, not_finite
from grpo_lab.io import saving
from grpo_lab.trainer.resume.checkpoint import CheckpointNotWritten
from grpo_lab.trainer.resume.state import plain_metrics, read_state, write_state
from grpo_lab.trainer.resume.whole import SAVING, all_in, keep, newest_whole, step_of
from grpo_lab.trainer.trl_bridge import plain_cpu

logger = logging.getLogger("grpo_lab")

#: Attributes in which TRL keeps metrics until the next log: the first of DPO and SFT, the second of CPO.
PENDING = ("_metrics", "_stored_metrics")


class TrainingStopped(Exception):
    """Raised when a training has ended on request and its checkpoint is written. ``step``: optimizer steps done."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, with a checkpoint")
        self.step = step


class StoppableTraining:
    """Runs a training that can be stopped, ``StoppableTraining(…)(trainer)``, or continues it from its checkpoint.

    Args:
        place: folder of the checkpoint; ``done`` removes it.
        identity: text that is the same for trainings on the same rows, settings and model. A checkpoint with another
            identity is not used.
        asked: returns whether to stop; called after each optimizer step but the last.
    """

    def __init__(self, place: Path, identity: str, asked: Callable[[], object]) -> None:
        self.place = place
        self.identity = identity
        self.asked = asked
        newest, passed = newest_whole(place, read=True)
        for why in passed:
            logger.warning("%s: passed over %s", place, why)
        if newest is not None and _read(newest).get("identity") != self.identity:
            logger.warning("%s is of a training on other rows or settings: this one begins at its first step", newest)
            newest = None
        self.checkpoint = newest

    @property
    def step(self) -> int:
        """Number of steps that are done already."""
        if self.checkpoint is None:
            return 0
        return step_of(self.checkpoint)

    def __call__(self, trainer: Any) -> None:
        """Train ``trainer`` to its end, from the checkpoint if there is one.

        Raises:
            TrainingStopped: a stop was asked for, and the checkpoint is written.
            CheckpointNotWritten: a stop was asked for, and the checkpoint could not be written; an earlier one stays.
            NumbersError: a stop was asked for, and the checkpoint has NaN or infinities; it is removed.
        """
        answer = _Answer(trainer, self)
        trainer.add_callback(answer)
        given = None
        if self.checkpoint is not None:
            given = str(self.checkpoint)
        try:
            with plain_cpu(trainer.args), saving(self.place):
                trainer.train(resume_from_checkpoint=given)
        except (OSError, RuntimeError) as error:
            if not answer.saving or isinstance(error, CheckpointNotWritten):
                raise
            shutil.rmtree(self.place / SAVING, ignore_errors=True)
            raise CheckpointNotWritten(
                f"asked to stop, and the checkpoint of step {trainer.state.global_step} could not be written to "
                f"{self.place}: {type(error).__name__}: {error}. Mend that; the same command goes on with this "
                f"training from step {self.step}"
            ) from error

    def done(self) -> None:
        """Remove the checkpoint: the training has ended, and its model is saved."""
        shutil.rmtree(self.place, ignore_errors=True)


class _Answer(TrainerCallback):  # type: ignore[misc]
    """Callback that stops the training when asked: it saves a checkpoint and raises TrainingStopped. On resuming, it
    restores what transformers does not. It is the last callback, so transformers has counted the step before it."""

    def __init__(self, trainer: Any, training: StoppableTraining) -> None:
        self.trainer = trainer
        self.training = training
        self.saving = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training.checkpoint is None:
            return
        trainer = self.trainer
        found = _read(self.training.checkpoint)
        trainer._tr_loss += torch.tensor(found["loss"], device=args.device)
        trainer._total_loss_scalar = found["total"]
        trainer._globalstep_last_logged = found["last_logged"]
        if found["tokens"] is not None:
            trainer._total_train_tokens = found["tokens"]
        for name in PENDING:
            for key, seen in found[name].items():
                getattr(trainer, name)["train"][key] = list(seen)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < state.max_steps and self.training.asked():
            partial = self.training.place / SAVING
            shutil.rmtree(partial, ignore_errors=True)
            self.trainer._get_output_dir = lambda trial=None: str(partial)
            self.saving = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.saving:
            return
        place = self.training.place / f"checkpoint-{state.global_step}"
        partial = self.training.place / SAVING / place.name
        if bad := not_finite(partial):
            shutil.rmtree(partial.parent, ignore_errors=True)
            raise NumbersError(f"asked to stop after step {state.global_step}, and nothing is kept of it: {bad}")
        window = {name: plain_metrics(getattr(self.trainer, name, {}).get("train", {})) for name in PENDING} | {
            "identity": self.training.identity,
            "loss": float(self.trainer._tr_loss),
            "total": self.trainer._total_loss_scalar,
            "last_logged": self.trainer._globalstep_last_logged,
            "tokens": getattr(self.trainer, "_total_train_tokens", None),
        }
        write_state(partial, {"training": window})
        keep(partial, place)
        for earlier in all_in(self.training.place):
            if step_of(earlier) < state.global_step:
                shutil.rmtree(earlier, ignore_errors=True)
        raise TrainingStopped(state.global_step)


def _read(checkpoint: Path) -> dict[str, Any]:
    """Return the entry ``training`` of a checkpoint's record; empty if it has none."""
    return dict(read_state(checkpoint).entries.get("training", {}))
