"""A reference that follows the policy: GRPO's outer loop, reference := policy (DeepSeekMath, arXiv 2402.03300,
algorithm 1).

    reference_every: 30            after every 30th optimizer step (the sorting run of the sources; R1-Zero: 400)
    reference_every: generation    before every generation batch: the loss's KL is then to the policy that generated

A batch's reference log-probs are made with the batch and stay, also where the reference moves while it is trained on.
TRL's ``sync_ref_model`` moves the reference by a callback of its own; it is carried through a resume here, too.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import TrainerCallback

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.resume.state import load_reference, save_reference

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort
    from grpo_lab.trainer.resume.state import SavedState


class MovingReference(TrainerCallback):  # type: ignore[misc]
    """Moves the reference, and takes one that has moved through checkpoints.

    Raises:
        ValueError: the reference cannot move: a new adapter, ZeRO-3, FSDP 1.
    """

    def __init__(self, trainer: StepPort, every: int | str | None) -> None:
        self.trainer, self.every = trainer, every
        self._moved = False
        if every is None:
            return
        unreachable = trl_bridge.whole_by_names(trainer)
        if unreachable is not None:
            raise ValueError(
                f"`reference_every` is {every!r} with {unreachable}: a moved reference could not be saved; use DDP, "
                "ZeRO-2 or FSDP2 "
                "(recipes/accelerate), or leave `reference_every` out"
            )
        trl_bridge.reference_tensors(trainer)  # whether there is one that can move

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._move()

    def before_generation(self) -> None:
        """Called before each generation batch of training."""
        if self.every == "generation":
            self._move()

    def _move(self) -> None:
        trl_bridge.copy_to_reference(self.trainer)
        self._moved = True

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Its weights into a checkpoint folder, where it has moved, and the record's entry, where it may. Called on
        every rank."""
        if not (self._moves() or self._moved):
            return None
        tensors = self._tensors() if self._has_moved() else None
        return save_reference(folder, tensors, bool(self.trainer.args.should_save))

    def load(self, saved: SavedState | None) -> None:
        """The reference as it was when the checkpoint was written; called on every rank."""
        if saved is None:
            return
        trl_bridge.load_policy_adapter(self.trainer, str(saved.checkpoint))
        moved = load_reference(saved, self._tensors)
        self._moved = bool(moved)
        if moved is None and self._moves():
            self.trainer.recorder.say(
                f"`resume_from_checkpoint`: {saved.checkpoint} does not hold the reference (stock TRL, an earlier "
                "version, or a run whose "
                "reference stood still): the reference is the start model",
                level=logging.WARNING,
            )

    def _tensors(self) -> dict[str, Tensor] | None:
        if self.trainer.beta == 0.0 or (self.trainer.ref_model is None and not self._moves()):
            return None
        return {name: ours for name, (ours, _) in trl_bridge.reference_tensors(self.trainer).items()}

    def _moves(self) -> bool:
        """Whether this run's reference can move, in a way that can be saved."""
        if self.every is not None:
            return True
        return bool(self.trainer.args.sync_ref_model) and trl_bridge.whole_by_names(self.trainer) is None

    def _has_moved(self) -> bool:
        args = self.trainer.args
        by_trl = args.sync_ref_model and self.trainer.state.global_step >= args.ref_model_sync_steps
        return bool(self._moved or by_trl)
