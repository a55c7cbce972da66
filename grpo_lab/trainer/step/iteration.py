"""Begin an iteration: the policy becomes the reference, and the optimizer's state is cleared.

    reference_every: 30            reference := policy after every 30th optimizer step, GRPO's outer loop (DeepSeekMath,
                                   arXiv 2402.03300, algorithm 1; R1-Zero: 400)
    reference_every: generation    before every generation batch: the loss's KL is then to the policy that generated
    reset_optimizer                after every generation batch, Kimi k1.5's iteration (arXiv 2501.12599, §2.3.2): the
                                   next data come from another policy than the moments

A batch's reference log-probs are made with the batch and stay, even if the reference moves while the batch is trained
on. TRL's ``sync_ref_model`` moves the reference by a callback of its own; a reference moved by it is saved and restored
here, too.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import Numbers, UpdatePort
from grpo_lab.trainer.resume.state import SavedState, load_reference, save_reference

#: Entries of parameter groups that a schedule moves. Any other entry that changes is state that clearing ``state``
#: misses.
SCHEDULED = ("lr", "initial_lr", "weight_decay", "betas", "momentum")


class MovingReference(TrainerCallback):  # type: ignore[misc]
    """Moves the reference, and saves and restores one that has moved.

    Args:
        trainer: the trainer that holds policy and reference.
        every: the setting ``reference_every``; None if the reference is not moved here.

    Raises:
        ValueError: the reference cannot be moved (a new adapter, ZeRO-3, FSDP 1).
    """

    holds = (
        "with `reference_every` or `sync_ref_model` whether the reference has moved; its weights, another model's size "
        "on disk, are then in `grpo_lab_reference/`"
    )

    def __init__(self, trainer: UpdatePort, every: int | str | None) -> None:
        self.trainer = trainer
        self.every = every
        self._moved = False
        if every is None:
            return
        unreachable = trl_bridge.whole_by_names(trainer.accelerator)
        if unreachable is not None:
            raise ValueError(
                f"`reference_every` is {every!r} with {unreachable}: a moved reference could not be saved; use DDP, "
                "ZeRO-2 or FSDP2 (recipes/accelerate), or leave `reference_every` out"
            )
        self._pairs()  # fails if there is none that can move

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the reference after every ``reference_every``-th optimizer step."""
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._move()

    def before_generation(self) -> None:
        """Move the reference with ``reference_every: generation``."""
        if self.every == "generation":
            self._move()

    def _move(self) -> None:
        with torch.no_grad():
            for reference, policy in self._pairs().values():
                reference.copy_(policy)
        self._moved = True

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Write the reference's weights into a checkpoint if it has moved; return the checkpoint's entry, or None if
        the reference can never move. Every rank calls it."""
        if not (self._moves() or self._moved):
            return None
        args = self.trainer.args
        by_trl = args.sync_ref_model and self.trainer.state.global_step >= args.ref_model_sync_steps
        return save_reference(folder, self._tensors() if self._moved or by_trl else None, bool(args.should_save))

    def load(self, saved: SavedState | None) -> None:
        """Restore the reference from the checkpoint. Every rank calls it."""
        if saved is None:
            return
        trl_bridge.load_policy_adapter(self._unwrapped(self.trainer.model), str(saved.checkpoint))
        moved = load_reference(saved, self._tensors)
        self._moved = bool(moved)
        if moved is None and self._moves():
            self.trainer.recorder.say(
                f"`resume_from_checkpoint`: {saved.checkpoint} does not hold the reference (stock TRL, an earlier "
                "version, or a run whose reference stood still): the reference is the start model",
                level=logging.WARNING,
            )

    def _tensors(self) -> dict[str, Tensor] | None:
        """Return name → the reference's tensor; None in a run without a reference that could be saved."""
        if self.trainer.beta == 0.0 or (self.trainer.ref_model is None and not self._moves()):
            return None
        return {name: ours for name, (ours, _) in self._pairs().items()}

    def _pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name → (the reference's, the policy's) tensor, this rank's part of each."""
        return trl_bridge.reference_tensors(
            self._unwrapped(self.trainer.model), self._unwrapped(self.trainer.ref_model)
        )

    def _unwrapped(self, model: Any) -> Any:
        return None if model is None else self.trainer.accelerator.unwrap_model(model)

    def _moves(self) -> bool:
        """Return whether this run's reference can move in a way that can be saved."""
        by_trl = self.trainer.args.sync_ref_model and trl_bridge.whole_by_names(self.trainer.accelerator) is None
        return self.every is not None or bool(by_trl)


def empty_optimizer(optimizer: Any) -> None:
    """Drop all moments and step counts, which the next step makes anew. accelerate's wrapper around the optimizer is
    removed first."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    optimizer.state.clear()


class OptimizerReset(TrainerCallback):  # type: ignore[misc]
    """Clears the optimizer's state after the last update on a generation batch, so that checkpoints hold no moments
    either, and once more before the next batch is generated.

    Weights, gradients and the learning-rate schedule are not touched. A run resumed inside a batch keeps the moments of
    its updates so far (``generation_buffer``).

    Raises:
        ValueError: with DeepSpeed, or if the optimizer has state in its parameter groups (schedule-free, Prodigy).
    """

    def __init__(self, trainer: UpdatePort) -> None:
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "`reset_optimizer` is on with DeepSpeed, whose engine keeps the optimizer's state in partitions of its "
                "own: use DDP or FSDP2 (recipes/accelerate), or leave `reset_optimizer` out"
            )
        self.trainer = trainer
        self._groups: list[dict[str, str]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._groups = _group_settings(optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Clear the optimizer's state after the last update on a generation batch. Raises ValueError if a parameter
        group holds state that the update has changed."""
        if not self.trainer.phase.at_end:
            return
        now = _group_settings(optimizer)
        for before, after in zip(self._groups or now, now, strict=True):
            moved = [name for name in after if after[name] != before.get(name)]
            if moved:
                raise ValueError(
                    f"`reset_optimizer` is on, but this optimizer (`optim`={self.trainer.args.optim!r}) keeps state in "
                    f"its parameter groups ({moved[0]!r}), which a reset would not reach: use AdamW or SGD"
                )
        empty_optimizer(optimizer)

    def before_generation(self) -> None:
        """Clear the optimizer's state, where there is an optimizer already."""
        if self.trainer.optimizer is not None:
            empty_optimizer(self.trainer.optimizer)


def _group_settings(optimizer: Any) -> list[dict[str, str]]:
    """Return name → value, in words, of each parameter group's entries that no schedule moves."""
    return [
        {name: repr(value) for name, value in group.items() if name != "params" and name not in SCHEDULED}
        for group in optimizer.param_groups
    ]


def idle_pull(trainer: Numbers) -> str | None:
    """Return a warning if a knob such as mirror descent's τ cannot act: a generation batch gets a single update."""
    objective = trainer.algorithm.objective
    args = trainer.args
    phase = trainer.phase
    surrogates = []
    if objective is not None:
        surrogates = [each.surrogate for each in objective.each]
    idle = [name for one in surrogates for name in getattr(one, "idle_on_policy", ()) if getattr(one, name)]
    if not idle or phase.every > phase.accumulation:
        return None
    return (
        f"`objective.{idle[0]}` has no effect: each generation batch gets a single update (steps_per_generation="
        f"{args.steps_per_generation}, num_iterations={phase.num_iterations}, gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps}), so the policy is the reference; raise `steps_per_generation` or "
        "`num_iterations`"
    )
