"""An empty optimizer after every generation batch: Kimi k1.5 resets it each iteration (arXiv 2501.12599, section
2.3.2).

The reason given there: the data of an iteration come from another policy than the moments of the iterations before. The
learning-rate schedule goes on; weights, gradients and the schedule are not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


#: group entries that a schedule moves; anything else that changes is state which clearing ``state`` would not reach
SCHEDULED = ("lr", "initial_lr", "weight_decay", "betas", "momentum")


def empty_optimizer(optimizer: Any) -> None:
    """Drop all moments and step counts; they are made anew at the next step. Sees through accelerate's wrapper."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    optimizer.state.clear()


class OptimizerReset(TrainerCallback):  # type: ignore[misc]
    """Empties the optimizer with the last update of a generation batch, so that checkpoints hold no moments either.

    ``before_generation`` does it again when a new batch is generated. A run resumed inside a batch goes on with that
    batch and with the moments of its updates so far (``generation_buffer``); where the checkpoint holds no batch it is
    generated anew, and that is a new iteration.

    Raises:
        ValueError: DeepSpeed, whose engine keeps the optimizer's state where this does not reach, or an optimizer with
            state in its parameter groups (schedule-free, Prodigy).
    """

    def __init__(self, trainer: StepPort) -> None:
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
        trainer = self.trainer
        if trainer.phase.at_end:
            self._check(optimizer)
            empty_optimizer(optimizer)

    def before_generation(self) -> None:
        if self.trainer.optimizer is not None:
            empty_optimizer(self.trainer.optimizer)

    def _check(self, optimizer: Any) -> None:
        now = _group_settings(optimizer)
        for before, after in zip(self._groups or now, now, strict=True):
            moved = [name for name in after if after[name] != before.get(name)]
            if moved:
                raise ValueError(
                    f"`reset_optimizer` is on, but this optimizer (`optim`={self.trainer.args.optim!r}) keeps state "
                    "in its "
                    f"parameter groups ({moved[0]!r}), which a reset would not reach: use AdamW or SGD"
                )


def idle_pull(trainer: StepPort) -> str | None:
    """A sentence where a knob such as mirror descent's τ cannot act: nothing has moved since the responses were
    made."""
    objective, args = trainer.algorithm.objective, trainer.args
    push = None if objective is None else objective.surrogate
    idle = [name for name in getattr(push, "idle_on_policy", ()) if getattr(push, name)]
    updates = trainer.phase.updates
    if not idle or updates > 1:
        return None
    return (
        f"`objective.{idle[0]}` has no effect: each generation batch gets a single update (steps_per_generation="
        f"{args.steps_per_generation}, num_iterations={trainer.num_iterations}, gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps}), so the policy is the reference; raise `steps_per_generation` or "
        "`num_iterations`"
    )


def _group_settings(optimizer: Any) -> list[dict[str, str]]:
    return [
        {name: repr(value) for name, value in group.items() if name != "params" and name not in SCHEDULED}
        for group in optimizer.param_groups
    ]
