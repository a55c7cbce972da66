"""HF's checkpoint on SIGTERM (``enable_jit_checkpoint``), written where a resume from it is exact.

transformers 5.17 writes it inside whichever of its events comes next after SIGTERM and three seconds:

    before the optimizer's step      the step is repeated on a resume, with the random numbers of after it: other completions
    at a step's end                  before that step is logged: its loss and metrics go into the next line a second time
    before a step                    exact

Here the request waits for the end of the step (the gradient is there already: what is left is the optimizer's update), and the
checkpoint is the ordinary one of that step, written after its log line. An evaluation that is due at that step is left out: it may
take longer than a scheduler waits. With several processes all write as soon as one was asked, since saving needs them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

if TYPE_CHECKING:
    from trl import GRPOTrainer


class StepEndCheckpoint(JITCheckpointCallback):  # type: ignore[misc]
    """In the place of HF's callback, with its signal handler; does nothing without ``enable_jit_checkpoint``."""

    @classmethod
    def in_place_of_hfs(cls, trainer: GRPOTrainer) -> StepEndCheckpoint:
        """Take HF's callback out of the trainer, where there is one, and go on with its state."""
        ours, callbacks = cls(), trainer.callback_handler.callbacks
        for place, callback in enumerate(callbacks):
            if type(callback) is JITCheckpointCallback:
                ours.trainer, ours.jit_manager = callback.trainer, callback.jit_manager
                callbacks[place] = ours
        return ours

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing: a checkpoint inside a step is not exact."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_requested():
            control.should_training_stop = True
            self.jit_manager.execute_jit_checkpoint()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_requested():
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def takes_over(self) -> bool:
        """Called where a checkpoint is about to be written: whether it was, as HF writes the requested one (with its mark)."""
        if self.jit_manager is None or not self.jit_manager.is_checkpoint_requested:
            return False
        self.jit_manager.execute_jit_checkpoint()
        return True

    def _is_requested(self) -> bool:
        """Whether any process was asked; the same answer on all of them."""
        manager = self.jit_manager
        if manager is None:
            return False
        accelerator = self.trainer.accelerator
        if accelerator.num_processes > 1:
            asked = torch.tensor([manager.is_checkpoint_requested], dtype=torch.long, device=accelerator.device)
            manager.is_checkpoint_requested = bool(accelerator.gather(asked).any())
        return bool(manager.is_checkpoint_requested)


__all__ = ["StepEndCheckpoint"]
