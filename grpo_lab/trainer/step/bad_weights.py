"""Weights that are not finite: looked for where a training begins, and before each generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_lab.trainer.ranks.places import at

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


class NumbersError(FloatingPointError):
    """Optimizer steps could not be taken (``guard.max_bad_steps``), or weights are not finite; ``grpo-lab`` exits with 4."""


def refuse_bad_weights(trainer: StepPort) -> None:
    """With a NaN among the weights nothing can be sampled, and torch says no more than "probability tensor".

    Raises:
        NumbersError: on every rank, naming tensors.
    """
    if bad := names_of_bad(trainer):
        raise NumbersError(
            f"the weights that the training starts from hold NaN or infinities, {bad}: look at how the model or the checkpoint was "
            "made, saved or converted (bf16, fp16)"
        )


def names_of_bad(trainer: StepPort) -> str | None:
    """Which tensors hold NaN or infinities on any rank, in words; None where none does. One number is read, and sent."""
    weights = dict(trainer.model.named_parameters())
    device = trainer.accelerator.device
    with at("whether the weights are finite"):
        bad = torch.stack(
            [torch.zeros((), dtype=torch.bool, device=device), *(_is_bad(one, device) for one in weights.values())]
        )
        if not bool(trainer.accelerator.gather(bad.any().reshape(1)).any()):
            return None
        here = [name for name, found in zip(weights, bad[1:].tolist(), strict=True) if found]
        names = sorted({name for of_rank in gather_object([here]) for name in of_rank})
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return f"in {len(names)} of {len(weights)} tensors ({', '.join(names[:3])}{more})"


def _is_bad(weight: Tensor, device: torch.device) -> Tensor:
    """bool, of this rank's part; smallest and largest say it without a copy of the weight."""
    here = weight.to_local() if hasattr(weight, "to_local") else weight
    packed = not here.is_floating_point() or here.element_size() < 2  # of a quantized model
    if here.is_meta or packed or not here.numel():
        return torch.zeros((), dtype=torch.bool, device=device)
    return ~torch.stack(torch.aminmax(here.detach())).isfinite().all().to(device)


__all__ = ["NumbersError", "names_of_bad", "refuse_bad_weights"]
