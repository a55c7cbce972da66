"""Ctrl-C during a training keeps a checkpoint, where checkpoints are asked for, and ends in one sentence.

The first Ctrl-C lets the step under way end and writes its checkpoint, from which a resumed run goes on as if nothing had happened.
While the trainer waits for a server it ends at once, with a checkpoint of the last step. A second Ctrl-C ends at once, without
one. Only where ``save_strategy`` is not ``no``, in a run of one process, from the main thread: the ranks of a larger run get the
signal at different steps, and a checkpoint takes all of them.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

if TYPE_CHECKING:
    from trl import GRPOTrainer

logger = logging.getLogger("grpo_lab")


class KeptOnInterrupt(TrainerCallback):  # type: ignore[misc]
    """Turns SIGINT during ``train`` into a checkpoint at the end of the step, then ``KeyboardInterrupt`` that names it."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._before: Any = None
        self.asked = False  # once: a checkpoint is due
        self.waiting = False  # for a server
        self.broke_off_a_wait = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.asked = self.broke_off_a_wait = False
        trainer = self._trainer()
        saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        alone = trainer is not None and trainer.accelerator.num_processes == 1
        if saves and alone and threading.current_thread() is threading.main_thread() and self._before is None:
            self._before = signal.signal(signal.SIGINT, self._interrupted)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.put_back()

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """While the trainer waits for a server, there may be no end of the step to wait for."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def put_back(self) -> None:
        """The handler of SIGINT as it was."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _interrupted(self, number: int, frame: Any) -> None:
        trainer, before = self._trainer(), self._before
        under_way = trainer is not None and trainer.is_in_train
        self.broke_off_a_wait = under_way and not self.asked and self.waiting
        if under_way and not self.asked and not self.waiting:
            self.asked = True
            logger.warning(
                "Ctrl-C: this step is finished and a checkpoint written; a second Ctrl-C ends at once, without one"
            )
            return
        self.put_back()
        if callable(before):
            before(number, frame)
        else:
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.asked:
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.asked:
            self.put_back()
            raise KeyboardInterrupt(
                kept(f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}", state.global_step)
            )


def kept(folder: str, step: int) -> str:
    """What an interrupted run says at its end."""
    return (
        f"interrupted after step {step}; a checkpoint was written to {folder}. Go on: `grpo-lab train … --resume`, or "
        f"trainer.train(resume_from_checkpoint={folder!r})"
    )


__all__ = ["KeptOnInterrupt", "kept"]
