"""A supervised or preference training inside a longer command that is asked to stop: a checkpoint within the step, and
on from it to the bit.

TRL's SFT, DPO and CPO trainers write no checkpoint here of themselves (``save_strategy: no``). Asked to stop, the step
under way ends and is logged; then transformers' checkpoint and, beside it, what it does not hold go into ``place``,
whole or not at all: what the training is of, loss and metrics since the last log, the sum of the losses, tokens seen
(the entry ``training`` of the record, ``resume/state.py``). The same training, begun again, goes on from there. One of
other rows, settings or another model begins anew.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from grpo_lab.finite import NumbersError, not_finite
from grpo_lab.io import move_whole, write_whole_text
from grpo_lab.trainer.resume.checkpoint import CheckpointNotWritten
from grpo_lab.trainer.resume.state import read_state, write_state
from grpo_lab.trainer.resume.whole import MARK, SAVING, mark_of, newest_whole, step_of
from grpo_lab.trainer.trl_bridge import plain_cpu

logger = logging.getLogger("grpo_lab")


class TrainingStopped(Exception):
    """It ended on request, after its checkpoint. ``step``: optimizer steps done."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, with a checkpoint")
        self.step = step


class StoppableTraining:
    """``StoppableTraining(…)(trainer)`` trains, or goes on with, what ``trainer`` is about to train.

    Args:
        place: folder of the checkpoint; ``done`` removes it.
        identity: of everything that the training follows from; a checkpoint of another one is not gone on with.
        asked: whether to stop; looked at after each optimizer step but the last.
    """

    def __init__(self, place: Path, identity: str, asked: Callable[[], object]) -> None:
        self.place, self.identity, self.asked = place, identity, asked
        self.checkpoint = self._found()

    @property
    def step(self) -> int:
        """The steps that are done already."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    def _found(self) -> Path | None:
        newest, passed = newest_whole(self.place, read=True)
        for why in passed:
            logger.warning("%s: passed over %s", self.place, why)
        if newest is not None and _read(newest).get("identity") != self.identity:
            logger.warning("%s is of a training on other rows or settings: this one begins at its first step", newest)
            return None
        return newest

    def __call__(self, trainer: Any) -> None:
        """
        Raises:
            TrainingStopped: asked to, after the checkpoint.
            CheckpointNotWritten: asked to, and it could not be written; what was there before is as it was.
        """
        answer = _Answer(trainer, self)
        trainer.add_callback(answer)
        given = None if self.checkpoint is None else str(self.checkpoint)
        try:
            with plain_cpu(trainer.args):
                trainer.train(resume_from_checkpoint=given)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not answer.saving or isinstance(error, CheckpointNotWritten):
                raise
            shutil.rmtree(self.place / SAVING, ignore_errors=True)
            raise CheckpointNotWritten(
                f"asked to stop, and the checkpoint of step {trainer.state.global_step} could not be written to "
                f"{self.place}: "
                f"{type(error).__name__}: {error}. Mend that; the same command goes on with this training from step "
                f"{self.step}"
            ) from error

    def done(self) -> None:
        """The training has come to its end, and its model is kept."""
        shutil.rmtree(self.place, ignore_errors=True)


class _Answer(TrainerCallback):  # type: ignore[misc]
    """Comes last: by then the step is counted and transformers has said what is due."""

    def __init__(self, trainer: Any, training: StoppableTraining) -> None:
        self.trainer, self.training, self.saving = trainer, training, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training.checkpoint is not None:
            _take_up(self.trainer, _read(self.training.checkpoint))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < state.max_steps and self.training.asked():
            partial = self.training.place / SAVING
            shutil.rmtree(partial, ignore_errors=True)
            self.trainer._get_output_dir = lambda trial=None: str(partial)
            self.saving = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.saving:
            partial = self.training.place / SAVING / f"checkpoint-{state.global_step}"
            if bad := not_finite(partial):
                shutil.rmtree(partial.parent, ignore_errors=True)
                raise NumbersError(f"asked to stop after step {state.global_step}, and nothing is kept of it: {bad}")
            write_state(partial, {"training": {"identity": self.training.identity, **_window(self.trainer)}})
            write_whole_text(partial / MARK, json.dumps(mark_of(partial, state.global_step)))
            move_whole(partial, self.training.place / partial.name)
            for earlier in self.training.place.glob("checkpoint-*"):
                if step_of(earlier) < state.global_step:
                    shutil.rmtree(earlier, ignore_errors=True)
            shutil.rmtree(partial.parent, ignore_errors=True)
            raise TrainingStopped(state.global_step)


def _read(checkpoint: Path) -> dict[str, Any]:
    return dict(read_state(checkpoint).entries.get("training", {}))


def _window(trainer: Any) -> dict[str, Any]:
    """What transformers and TRL keep in memory: DPO and SFT in ``_metrics``, CPO in ``_stored_metrics``."""
    return {
        "loss": float(trainer._tr_loss),
        "total": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        "tokens": getattr(trainer, "_total_train_tokens", None),
        **{name: _plain(getattr(trainer, name, {})) for name in ("_metrics", "_stored_metrics")},
    }


def _plain(pending: Any) -> dict[str, Any]:
    metrics = pending.get("train", {})
    return {key: [one if type(one) in (int, float) else float(one) for one in seen] for key, seen in metrics.items()}


def _take_up(trainer: Any, found: dict[str, Any]) -> None:
    trainer._tr_loss += torch.tensor(found["loss"], device=trainer.args.device)
    trainer._total_loss_scalar, trainer._globalstep_last_logged = found["total"], found["last_logged"]
    if found["tokens"] is not None:
        trainer._total_train_tokens = found["tokens"]
    for name in ("_metrics", "_stored_metrics"):
        for key, seen in found[name].items():
            getattr(trainer, name)["train"][key] = list(seen)
