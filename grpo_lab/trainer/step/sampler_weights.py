"""Weights of the sampler correction: from the fields of a micro-batch, or of a whole generation batch at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_lab.objectives import Correction, sampler_log_ratio
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import StepPort, UpdatePort
from grpo_lab.trainer.row_table import Carried, loss_mask
from grpo_lab.trainer.step.log_probs import (
    GenerationForwards,
    ProximalSource,
    log_probs_in_bins,
    padded_log_probs,
    reads_own_forward,
)


def needs_batch(correction: Correction | None) -> bool:
    """Return whether the weights depend on all rows of the generation batch."""
    return bool(getattr(correction, "whole_batch", False))


@torch.no_grad()
def sampler_weights(
    correction: Correction | None, proximal_logps: Tensor, fields: dict[str, Any], mask: Tensor
) -> Tensor | None:
    """Return the sampler's weights for the rows of a micro-batch or bin, ``[B, T]`` or ``[B, 1]``: those that were made
    at generation, else those of ``correction``. None without a correction.

    Args:
        correction: the run's sampler correction; None without one.
        proximal_logps: ``[B, T]`` in nats.
        fields: the rows' fields (``Carried``).
        mask: bool ``[B, T]``, tokens that carry loss.
    """
    carried = Carried(fields)
    if carried.sampler_weights is not None or correction is None:
        return carried.sampler_weights
    weights: Tensor = correction(sampler_log_ratio(proximal_logps, carried.behaviour_logps, mask), mask)
    return weights


def rejected_rows(trainer: UpdatePort, mask: Tensor, fields: dict[str, Any]) -> Tensor | None:
    """Return bool ``[B]``: rows whose weight is known, before any forward, to be 0 on every loss token; None if no
    weight is known yet.

    A weight is known if it was made at generation, or if it follows from stored proximal log-probs. The latter holds
    only in full precision: the stored log-probs come from bins that hold these rows, and in half precision log-probs
    depend on the bins.
    """
    carried = Carried(fields)
    if carried.sampler_weights is not None:
        known = torch.ones_like(mask[:, 0])
    elif trainer.correction is None or ProximalSource.of(fields) is ProximalSource.LOSS or not _in_full(trainer):
        return None
    else:
        known = ~reads_own_forward(fields)
    weights = sampler_weights(trainer.correction, carried.proximal_logps, fields, mask)
    assert weights is not None
    return known & ~((weights != 0) & mask).any(dim=1)


def _in_full(trainer: UpdatePort) -> bool:
    """Return whether forwards compute in float32 or wider."""
    wide = all(weights.dtype.itemsize >= 4 for weights in trainer.model.parameters())
    return wide and trainer.accelerator.mixed_precision == "no"


def check_reported(trainer: StepPort, batch: dict[str, Any]) -> None:
    """Raise ValueError if ``correction`` is set and the completions to train on came without the log-probs of their
    sampler."""
    asked = trainer.algorithm.names.get("correction")
    training = trainer.recorder.mode() == "train"
    if asked is not None and training and Carried(batch).behaviour_logps is None:
        raise ValueError(
            f"`correction` is {asked!r}, and the completions came without the log-probs that their tokens "
            f"were sampled with: set `use_vllm: true`, return them (from `rollout_func`, or as the second of what "
            "`_generate_single_turn` returns), or leave `correction` out"
        )


@torch.no_grad()
def weigh_batch(trainer: StepPort, batch: dict[str, Any], forwards: GenerationForwards) -> None:
    """Write the weights of a correction that needs the whole generation batch into ``batch``, this rank's rows. A
    collective for such a correction."""
    correction = trainer.correction
    if correction is None or not needs_batch(correction):
        return
    carried = Carried(batch)
    proximal = carried.proximal_logps
    if proximal is None and forwards.in_bins:
        proximal = log_probs_in_bins(trainer, trainer.model, batch)
    elif proximal is None:
        with trl_bridge.without_checkpointing(trainer.model, trainer.args):
            proximal = padded_log_probs(trainer, batch)
    mask = loss_mask(batch)
    x = sampler_log_ratio(proximal, carried.behaviour_logps, mask)
    carried.sampler_weights = correction(x, mask, trainer.accelerator.gather)
