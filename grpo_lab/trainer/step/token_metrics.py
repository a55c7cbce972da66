"""What a micro-batch or bin says for the log: entropy, KL, the surrogate's diagnostics, TRL's ``sampling/*``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import Objective
from grpo_lab.trainer.metrics.book import EXTREMES, NOTHING, LeftOut, MetricBook, add_extreme_metric, add_token_metric
from grpo_lab.trainer.metrics.by_length import add_by_length
from grpo_lab.trainer.proof.loss_proof import toy_batch

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


@torch.no_grad()
def record_tokens(
    trainer: StepPort, book: MetricBook, batch: TokenBatch, slots: Tensor | None = None, num_slots: int = 1
) -> None:
    """Entropy, KL and the surrogate's diagnostics of a micro-batch or bin into the book."""
    objective = trainer.algorithm.objective
    assert objective is not None
    values = dict(objective.diagnostics(batch))
    if batch.entropies is not None:
        values["entropy"] = batch.entropies
    if objective.kl_in_loss is not None:
        values["kl"] = objective.kl_in_loss.in_loss(batch)
    for name, value in values.items():
        add_token_metric(book, name, value, batch.mask, slots, num_slots)
    if batch.sampler_weights is not None and "sampling_per_token_logps" in batch.extras:
        _record_sampler(trainer, book, batch, slots, num_slots)


def _record_sampler(
    trainer: StepPort, book: MetricBook, batch: TokenBatch, slots: Tensor | None, num_slots: int
) -> None:
    """TRL's ``sampling/*`` metrics, where the correction was made in the loss rather than at generation."""
    if "importance_sampling_ratio" in batch.extras:
        return  # TRL made and logged it
    assert batch.sampler_weights is not None
    weights, mask = batch.sampler_weights, batch.mask
    add_by_length(book, trainer, weights, mask, batch.extras["length_quartile"])
    if slots is not None:  # TRL measures a generation batch at a time
        slots = slots // trainer.phase.every
    gap = (batch.old_logps - batch.extras["sampling_per_token_logps"]).abs()
    scored = mask & ~gap.isnan()
    gap = gap.nan_to_num(nan=0.0)
    add_token_metric(book, "sampling/sampling_logp_difference/mean", gap, scored, slots, num_slots)
    add_token_metric(book, "sampling/importance_sampling_ratio/mean", weights, mask, slots, num_slots)
    chosen = mask.any(1, keepdim=True) if weights.size(1) == 1 else mask
    for name, how, values, where in (
        ("sampling/sampling_logp_difference/max", "max", gap, scored),
        ("sampling/importance_sampling_ratio/min", "min", weights, chosen),
        ("sampling/importance_sampling_ratio/max", "max", weights, chosen),
    ):
        add_extreme_metric(book, name, how, values, where, slots, num_slots)


def record_skipped(trainer: StepPort, book: MetricBook, batch: TokenBatch, left_out: LeftOut) -> None:
    """Count rows that were left out where their value is known: the surrogate's diagnostics are 0 there.

    ``batch`` is a bin of this step and says which diagnostics there are. Whether one is a value per row or per token cannot
    be read off a bin that is one token wide (a dummy, completions of one token): ``per_row`` asks the objective.
    """
    objective = trainer.algorithm.objective
    assert objective is not None
    rows = per_row(objective)
    nothing = left_out.without_tokens * NOTHING
    for name, value in objective.diagnostics(batch).items():
        of_rows = left_out.one_token_wide or (rows.get(name, False) if batch.mask.size(1) == 1 else value.size(1) == 1)
        book.add(name, torch.zeros_like(left_out.tokens), left_out.rows if of_rows else left_out.tokens + nothing)
        if name in EXTREMES:
            extreme, how = EXTREMES[name]
            seen = left_out.rows if of_rows else left_out.rows_with_tokens
            book.add_extreme(extreme, how, torch.where(seen > 0, 0.0, torch.inf if how == "min" else -torch.inf))
    for name in ("entropy", *(["kl"] if objective.kl_in_loss is not None else [])):
        book.add(name, torch.zeros_like(nothing), nothing)


def per_row(objective: Objective) -> dict[str, bool]:
    """For each diagnostic of the objective: is it one value a row (as with a sequence ratio), and not one a token?

    Asked on a toy batch of several tokens, where the two look different.
    """
    return {name: value.size(1) == 1 for name, value in objective.diagnostics(toy_batch(objective)).items()}
