"""FSDP2: an optimizer's state as it is, also where trained weights have none yet.

Weights without moments are those that have made no step: the policy's in ``value.warmup_steps``, all of them where the
guard has left out every step so far, an expert that no token was sent to. torch 2.13 makes them up when it saves an
optimizer that has none at all (by a step with zero gradients, counted in AdamW's bias correction, in the running
training, too), and refuses the checkpoint that lacks some: "Missing optimizer state for parameter". So a checkpoint
names them, and those alone may be missing, and are missing again after the load.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import state_dict as torchs

from grpo_lab.trainer.trl_bridge.names import replaced


def _is_fsdp2(trainer: Any) -> bool:
    return bool(trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2)


def _without_moments(trainer: Any) -> list[str]:
    """Names of the weights in the optimizer for which it holds nothing; alike on every rank."""
    optimizer = trainer.optimizer
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, p in trainer.model.named_parameters() if id(p) in own and not optimizer.state.get(p)]


@contextlib.contextmanager
def optimizer_saved_as_it_is(trainer: Any) -> Iterator[None]:
    """While a checkpoint is written torch makes up no moments."""
    if not _is_fsdp2(trainer):
        yield
        return
    with replaced(torchs, "_init_optim_state", lambda optimizer: None):
        yield


def without_moments(trainer: Any) -> dict[str, Any] | None:
    """The weights that a checkpoint names; None where all have moments, or torch asks for none."""
    missing = _without_moments(trainer) if _is_fsdp2(trainer) else []
    return {"without_moments": missing} if missing else None


@contextlib.contextmanager
def optimizer_loaded_as_it_was(trainer: Any, named: set[str]) -> Iterator[None]:
    """Inside the block the optimizer of a checkpoint is loaded; the weights ``named`` in it have no moments
    afterwards."""
    if not named or not _is_fsdp2(trainer):
        yield
        return
    split = torchs._split_optim_state_dict

    def lenient(model: Any, optimizer: Any, state: Any, info: Any) -> Any:
        lacking = {name for group in state["param_groups"] for name in group["params"]} - set(state["state"])
        return split(model, optimizer, state, dataclasses.replace(info, strict=not lacking <= named))

    with replaced(torchs, "_split_optim_state_dict", lenient):
        yield
    for name, parameter in trainer.model.named_parameters():
        if name in named:
            trainer.optimizer.state.pop(parameter, None)
