"""Weights that are not finite, on any rank: looked for where a training begins, before each generation, and before what
it made is saved."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_lab.finite import NumbersError, in_words, is_bad
from grpo_lab.trainer.ranks.places import at

TO_START_FROM = "that the training starts from hold"
TRAINED = "that the training has left hold"


def refuse_bad_weights(trainer: Any, which: str) -> None:
    """With a NaN among the weights nothing can be sampled, and torch says no more than "probability tensor".

    Raises:
        NumbersError: on every rank, naming tensors.
    """
    if bad := names_of_bad(trainer):
        blame = (
            "how the model or the checkpoint was made, saved or converted (bf16, fp16)"
            if which == TO_START_FROM
            else "the optimizer (weights in fp16, `adam_epsilon`, `learning_rate`); nothing is saved"
        )
        raise NumbersError(f"the weights {which} NaN or infinities, {bad}: look at {blame}")


def names_of_bad(trainer: Any) -> str | None:
    """Which tensors hold NaN (a buffer) or also infinities (a weight: masks are infinite buffers) on any rank, in
    words; None where none does. One number is read, and sent.
    """
    found = {name: _here(one) for name, one in trainer.model.named_parameters()}
    buffers = {name: _here(one) for name, one in trainer.model.named_buffers()}
    device = trainer.accelerator.device
    with at("whether the weights are finite"):
        flags = [is_bad(one) for one in found.values()] + [is_bad(one, infinite=False) for one in buffers.values()]
        bad = torch.stack([torch.zeros((), dtype=torch.bool, device=device), *(flag.to(device) for flag in flags)])
        if not bool(trainer.accelerator.gather(bad.any().reshape(1)).any()):
            return None
        here = [name for name, one in zip((*found, *buffers), bad[1:].tolist(), strict=True) if one]
        names = sorted({name for of_rank in gather_object([here]) for name in of_rank})
    return in_words(names, len(flags))


def _here(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
