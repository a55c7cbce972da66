"""The critic in the optimizer: groups of its own in the one optimizer, and the steps in which it alone learns."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from grpo_lab.trainer.settings.parse import ValueSettings
from grpo_lab.trainer.trl_bridge import policy_parameters


def split_groups(optimizer: Any, critic: nn.Module, learning_rate: float | None) -> None:
    """Take the critic's parameters out of each group into one beside it, which differs in the learning rate.

    Raises:
        ValueError: the optimizer's groups do not hold the critic's parameters (an optimizer that makes its own).
    """
    own = {id(parameter) for parameter in critic.parameters()}
    moved = 0
    for group in list(optimizer.param_groups):
        critics = [p for p in group["params"] if id(p) in own]
        if not critics:
            continue
        moved += len(critics)
        settings = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        group["params"] = [p for p in group["params"] if id(p) not in own]
        rate = group["lr"] if learning_rate is None else learning_rate
        optimizer.add_param_group({**settings, "params": critics, "lr": rate})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    if moved != len(own):
        raise ValueError(
            f"`optim`: {type(optimizer).__name__} holds {moved} of the critic's {len(own)} parameters; choose one "
            "that takes "
            "parameter groups (e.g. adamw_torch)"
        )


def with_critics_groups(trainer: Any, optimizer: Any, critic: nn.Module | None) -> Any:
    """The optimizer that HF made, with groups of the critic's own; each call of HF's may find them made already."""
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper, where a second training begins
    if critic is not None and not getattr(own, "grpo_lab_split", False):
        split_groups(own, critic, trainer.algorithm.value.learning_rate)
        own.grpo_lab_split = True
    return optimizer


def is_warming_up(trainer: Any) -> bool:
    """Whether the critic alone learns in the step at hand (``value.warmup_steps``)."""
    value = trainer.algorithm.value
    return value is not None and bool(trainer.model.training) and trainer.state.global_step < value.warmup_steps


class CriticAlone(TrainerCallback):  # type: ignore[misc]
    """In the warm-up the policy's zero gradients are taken away, so that its moments do not count steps that it did not
    make.

    AdamW's bias correction would else divide the policy's first real gradients by a second moment that has forgotten to
    be one.
    """

    def __init__(self, trainer: Any, value: ValueSettings) -> None:
        self.trainer, self.steps = trainer, value.warmup_steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < self.steps:
            for parameter in policy_parameters(self.trainer.model):
                parameter.grad = None
