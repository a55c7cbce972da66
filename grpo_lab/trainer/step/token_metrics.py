"""What a micro-batch or bin says for the log: entropy, KL, the surrogate's diagnostics, TRL's ``sampling/*``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import Objective
from grpo_lab.trainer.carried import Carried
from grpo_lab.trainer.metrics.book import LeftOut, MetricBook, Origin
from grpo_lab.trainer.metrics.by_length import add_by_length
from grpo_lab.trainer.proof.loss_proof import toy_batch
from grpo_lab.trainer.step.values import value_metrics

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


@torch.no_grad()
def record_tokens(trainer: StepPort, book: MetricBook, batch: TokenBatch, origin: Origin | None = None) -> None:
    """Entropy, KL and the surrogate's diagnostics into the book.

    Args:
        origin: of the rows of a bin; ``None``: the batch is a micro-batch as TRL cut it.
    """
    objective = trainer.algorithm.objective
    assert objective is not None
    values = dict(objective.diagnostics(batch))
    if batch.entropies is not None:
        values["entropy"] = batch.entropies
    if objective.kl_in_loss is not None:
        values["kl"] = objective.kl_in_loss.in_loss(batch)
    values.update(value_metrics(trainer, batch))
    for name, value in values.items():
        book.add_tokens(name, value, batch.mask, origin)
    carried = Carried(batch.extras)
    if batch.sampler_weights is not None and carried.sampler_logps is not None and carried.sampler_weights is None:
        _record_sampler(trainer, book, batch, carried.sampler_logps, origin)


def _record_sampler(
    trainer: StepPort, book: MetricBook, batch: TokenBatch, sampler_logps: Tensor, origin: Origin | None
) -> None:
    """TRL's ``sampling/*`` metrics, where the correction was made in the loss rather than at generation (there TRL logs it)."""
    weights, mask, how = batch.sampler_weights, batch.mask, trainer.correction
    quartiles = Carried(batch.extras).length_quartile
    assert weights is not None
    assert quartiles is not None
    assert how is not None
    add_by_length(book, how, weights, mask, quartiles)
    gap = (batch.old_logps - sampler_logps).abs()
    scored = mask & ~gap.isnan()
    gap = gap.nan_to_num(nan=0.0)
    book.add_tokens("sampling/sampling_logp_difference/mean", gap, scored, origin)
    book.add_tokens("sampling/importance_sampling_ratio/mean", weights, mask, origin)
    chosen = mask.any(1, keepdim=True) if weights.size(1) == 1 else mask
    book.add_worst("sampling/sampling_logp_difference/max", "max", gap, scored, origin)
    book.add_worst("sampling/importance_sampling_ratio/min", "min", weights, chosen, origin)
    book.add_worst("sampling/importance_sampling_ratio/max", "max", weights, chosen, origin)


def record_skipped(trainer: StepPort, book: MetricBook, batch: TokenBatch, left_out: LeftOut) -> None:
    """Count rows that were left out where their value is known: the surrogate's diagnostics are 0 there.

    ``batch`` is a bin of this step and says which diagnostics there are. Whether one is a value per row or per token cannot
    be read off a bin that is one token wide (a dummy, completions of one token): ``per_row`` asks the objective.
    """
    objective = trainer.algorithm.objective
    assert objective is not None
    rows = per_row(objective)
    for name, value in objective.diagnostics(batch).items():
        of_rows = rows.get(name, False) if batch.mask.size(1) == 1 else value.size(1) == 1
        book.add_zeros(name, left_out, of_rows)
    for name in ("entropy", *(["kl"] if objective.kl_in_loss is not None else [])):
        book.add_unseen(name, left_out)


def per_row(objective: Objective) -> dict[str, bool]:
    """For each diagnostic of the objective: is it one value a row (as with a sequence ratio), and not one a token?

    Asked on a toy batch of several tokens, where the two look different.
    """
    return {name: value.size(1) == 1 for name, value in objective.diagnostics(toy_batch(objective)).items()}
