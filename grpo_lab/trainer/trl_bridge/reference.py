"""TRL's reference, wherever it keeps it: a model of its own, or the adapter ``ref`` beside the one that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lab.trainer.trl_bridge.values import without_critic

#: what TRL calls the copy of an adapter that the policy came with, and the adapter itself
REFERENCE_ADAPTER, POLICY_ADAPTER = "ref", "default"


def reference_tensors(trainer: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Name → (the reference's, the policy's): parameters and buffers that correspond, this rank's part where they are sharded.

    Raises:
        ValueError: there is no reference that could move, or it is built otherwise than the policy.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.ref_model is None:
        return _of_adapters(policy)
    reference = trainer.accelerator.unwrap_model(trainer.ref_model)
    ours = [*reference.named_parameters(), *reference.named_buffers()]
    theirs = [*without_critic(policy.named_parameters()), *without_critic(policy.named_buffers())]
    if [value.shape for _, value in ours] != [value.shape for _, value in theirs]:
        raise ValueError(
            f"the policy has {len(theirs)} parameters and buffers and the reference {len(ours)}, or of other shapes: a copy of the one "
            "is not the other (`reference_every`, `sync_ref_model`)"
        )
    return {name: (value, source) for (name, value), (_, source) in zip(ours, theirs, strict=True)}


def _of_adapters(policy: Any) -> dict[str, tuple[Tensor, Tensor]]:
    if REFERENCE_ADAPTER not in getattr(policy, "peft_config", {}):
        raise ValueError(
            "`reference_every` copies the policy into the reference, and under a new adapter (`peft_config`) the reference is the base "
            "model with the adapter off, which cannot move: give the trainer a model that has its adapter already "
            "(`peft.get_peft_model`), of which TRL keeps a copy as reference, or leave `reference_every` out"
        )
    values = dict(policy.named_parameters())
    own = [name for name in values if f".{POLICY_ADAPTER}." in name]
    names = {name: name.replace(f".{POLICY_ADAPTER}.", f".{REFERENCE_ADAPTER}.") for name in own}
    return {names[name]: (values[names[name]], values[name]) for name in own}


def copy_to_reference(trainer: Any) -> None:
    """reference := policy, to the bit; each rank its own part."""
    with torch.no_grad():
        for reference, policy in reference_tensors(trainer).values():
            reference.copy_(policy)


def load_policy_adapter(trainer: Any, checkpoint: str) -> None:
    """The trained adapter of a checkpoint that holds TRL's copy beside it; without such a copy nothing.

    PEFT saves the copy as the folder ``ref``, and transformers 5.17 (``Trainer._load_from_checkpoint``) loads either the adapters in
    folders or the one beside them: the copy alone, so that the policy would start again where it began, with a warm optimizer.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    saved = Path(checkpoint)
    if REFERENCE_ADAPTER not in getattr(policy, "peft_config", {}) or not (saved / REFERENCE_ADAPTER).is_dir():
        return
    if any((saved / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        policy.load_adapter(checkpoint, POLICY_ADAPTER, is_trainable=True)
        policy.set_adapter(POLICY_ADAPTER)


def whole_by_names(trainer: Any) -> str | None:
    """Why a rank cannot read and write the reference tensor by tensor, or ``None``."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3, which keeps weights in partitions of its own"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "FSDP 1, which keeps weights in flat pieces of its own"
    return None


__all__ = ["copy_to_reference", "load_policy_adapter", "reference_tensors", "whole_by_names"]
