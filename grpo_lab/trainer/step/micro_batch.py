"""Turn a micro-batch (or bin) into the ``TokenBatch`` that objectives see, and compute its loss.

The critic's loss is one more term per token, averaged like the policy's: loss_t = policy_t + vf_coef · value_t. It
reads every token of the policy, whatever its advantage, so no row can be left out (``LiveConditions.value_loss``).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lab.batch import Denominators, TokenBatch, safe
from grpo_lab.objectives import Objective, log_ratio
from grpo_lab.objectives.value_loss import value_loss
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.critic import is_warming_up
from grpo_lab.trainer.metrics.book import MetricBook, Origin
from grpo_lab.trainer.ports import Numbers, StepPort, UpdatePort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import Carried, loss_mask, row_lengths
from grpo_lab.trainer.step.log_probs import proximal_log_probs
from grpo_lab.trainer.step.row_numbers import StepRows
from grpo_lab.trainer.step.sampler_weights import sampler_weights
from grpo_lab.trainer.step.silent import with_gradient
from grpo_lab.trainer.step.update_record import (
    made_in_loss,
    record_losses,
    record_sampling,
    record_tokens,
    record_without_gradient,
    value_targets,
)


def token_denominator(trainer: UpdatePort, inputs: dict[str, Any]) -> Tensor:
    """Return the tokens that ``token_mean`` divides by, per rank, as TRL counts them: those of the generation batch,
    rescaled to one accumulation window."""
    count: Tensor = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        count = count * trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return count


def denominators_of(trainer: StepPort, inputs: dict[str, Any], rows: float, micro_batches: float) -> Denominators:
    """Return the denominators of a step, counted over all rows that TRL would compute. ``group_tokens`` is not among
    them: each row carries its own (``with_group_tokens``).

    Without a token limit the budget is NaN, and no aggregation that divides by it is allowed
    (``settings.inputs.check_budget``).

    Args:
        trainer: the trainer.
        inputs: a micro-batch of the step, for its token count.
        rows: rows of the step on this rank.
        micro_batches: micro-batches of the step.
    """
    limit = trainer.max_completion_length
    budget = float("nan") if limit is None else float(limit)
    prompts = rows / trainer.current_group_size
    return Denominators(rows, token_denominator(trainer, inputs), budget, micro_batches, prompts)


def denominators_of_step(trainer: StepPort, window: list[dict[str, Any]], rows: float) -> Denominators:
    """Return the denominators of an optimizer step of the micro-batches ``window``, with ``rows`` rows on this rank.

    If the micro-batches come from several generation batches, each row has its own token count (``of_rows``), and
    ``tokens`` is NaN.
    """
    denominators = denominators_of(trainer, window[0], rows, len(window))
    first = window[0]["num_items_in_batch"]
    if any(batch["num_items_in_batch"] is not first for batch in window):
        return replace(denominators, tokens=float("nan"))
    return denominators


def with_group_tokens(denominators: Denominators, batch: TokenBatch) -> Denominators:
    """Return the denominators for the rows of ``batch``, with ``group_tokens`` if the rows carry the tokens of their
    prompts."""
    of_rows = Carried(dict(batch.extras)).group_tokens
    if of_rows is None:
        return denominators
    return replace(denominators, group_tokens=of_rows.unsqueeze(1))


def token_batch(
    trainer: Numbers, logps: Tensor, entropies: Tensor, mask: Tensor, fields: dict[str, Any], values: Tensor | None
) -> TokenBatch:
    """Return the ``TokenBatch`` that surrogates see for one micro-batch or bin.

    Args:
        trainer: the trainer, for objective and sampler correction.
        logps: ``[B, T]`` log-probs of the policy, with gradient.
        entropies: ``[B, T]`` in nats.
        mask: bool ``[B, T]``, tokens that carry loss.
        fields: the rows' fields (``Carried``).
        values: ``[B, T]`` of the critic; None without one.
    """
    objective = trainer.algorithm.objective
    assert objective is not None
    old = proximal_log_probs(logps, fields)
    advantages = fields["advantages"]
    carried = Carried(fields)
    return TokenBatch(
        logps=logps,
        proximal_logps=old,
        log_ratio=log_ratio(objective.ratio, logps, old, mask),
        advantages=advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
        mask=mask,
        ref_logps=carried.ref_logps,
        entropies=entropies,
        sampler_weights=sampler_weights(trainer.correction, old, fields, mask),
        values=values,
        extras={name: value for name, value in fields.items() if isinstance(value, Tensor) and value.dim() > 0},
        chosen=carried.chosen,
    )


def record_rejected(trainer: Numbers, book: MetricBook, step: StepRows, origin: Origin) -> None:
    """Log the sampler's metrics of this rank's rejected rows, which are in no bin, if the correction is made in the
    loss. (Those of computed rows are logged with their bins.)"""
    fields = step.table.fields
    carried = Carried(fields)
    if step.rejected is None or carried.proximal_logps is None or not made_in_loss(trainer, carried):
        return
    mask = step.table.loss_mask & step.rejected.unsqueeze(1) & (fields["advantages"] != 0).view(len(step.slots), -1)
    proximal = carried.proximal_logps
    batch = token_batch(trainer, proximal, torch.zeros_like(proximal), mask, fields, None)
    assert batch.sampler_weights is not None
    record_sampling(trainer, book, batch, batch.sampler_weights, origin)


@torch.no_grad()
def with_choices(trainer: UpdatePort, batch: TokenBatch) -> TokenBatch:
    """Return a micro-batch as TRL cut it, with the tokens that the selecting parts choose. A collective if there are
    such parts and several ranks."""
    objective = trainer.algorithm.objective
    assert objective is not None
    if not objective.selecting:
        return batch

    def gather(values: Tensor) -> Tensor:
        return all_ranks(trainer.accelerator, values)

    return replace(batch, chosen={part.selection: part.select(batch, gather) for part in objective.selecting})


def all_ranks(accelerator: Any, values: Tensor) -> Tensor:
    """Return one-dimensional ``values`` of all ranks, in rank order; ranks may bring different numbers of them. A
    collective on several ranks."""
    if accelerator.num_processes == 1:
        return values
    sent = values.byte() if values.dtype is torch.bool else values  # gloo sends no bools
    with named_place("choice of tokens"):
        sizes = accelerator.gather(torch.tensor([values.numel()], device=values.device)).tolist()
        padded = torch.nn.functional.pad(sent, (0, max(*sizes, 1) - values.numel()))
        parts = accelerator.gather(padded).view(len(sizes), -1)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(values.dtype)


def capture_values(trainer: UpdatePort, model: Any) -> contextlib.AbstractContextManager[list[Tensor]]:
    """Return a context for a training forward. It gives a list, into which the forward writes the critic's values ``[B,
    L - 1]``; without a critic the list stays empty."""
    if trainer.algorithm.value is None:
        return contextlib.nullcontext([])
    return trl_bridge.values_heard(trainer.accelerator, model, trunk_learns=not is_warming_up(trainer))


def token_loss(trainer: StepPort, batch: TokenBatch) -> Tensor:
    """Return the loss per token ``[B, T]``: the policy's (the hook ``token_loss``) plus vf_coef times the critic's;
    during the critic's warm-up only the latter."""
    value = trainer.algorithm.value
    if value is None:
        return trainer.token_loss(batch)
    assert batch.values is not None
    old, returns, mask = value_targets(batch)
    critics = safe(value_loss(safe(batch.values, mask), old, returns, value.cliprange_value), mask)
    # the zero keeps the policy in the graph, where DDP looks for it
    if is_warming_up(trainer):
        policy = safe(0.0 * batch.logps, batch.mask)
    else:
        policy = trainer.token_loss(batch)
    return policy + value.vf_coef * critics


def of_rows(denominators: Denominators, token_count: Tensor) -> Denominators:
    """Return the denominators of some rows. If the rows of a step come from several generation batches,
    ``denominators.tokens`` is a NaN in place of a tensor, and each row has its own count, ``token_count`` ``[B]``."""
    if isinstance(denominators.tokens, float):
        return replace(denominators, tokens=token_count.unsqueeze(1))
    return denominators


def scalar_loss(trainer: StepPort, batch: TokenBatch, denominators: Denominators) -> Tensor:
    """Return the loss of a micro-batch (or bin): its tokens' losses, aggregated by the objective, without the entropy
    bonus."""
    objective = trainer.algorithm.objective
    assert objective is not None
    denominators = with_group_tokens(denominators, batch)
    of_tokens = token_loss(trainer, batch)
    record_losses(trainer, batch, of_tokens.detach(), denominators)
    return objective.aggregated(of_tokens, batch, denominators)


def micro_batch_loss(trainer: StepPort, model: nn.Module, inputs: dict[str, Any], objective: Objective) -> Tensor:
    """Return the loss of one micro-batch as TRL cut it, by our objective and TRL's own forward: all rows, all padding,
    images, router loss."""
    mode = trainer.recorder.mode()
    with capture_values(trainer, model) as heard:
        logps, entropies, router_loss = trl_bridge.stock_forward(
            trainer, model, inputs, compute_entropy=True, compute_aux_loss=trainer.aux_loss_enabled
        )
    values = None
    if heard:
        values = heard[0][:, -logps.size(1) :]
    batch = with_choices(trainer, token_batch(trainer, logps, entropies, loss_mask(inputs), inputs, values))
    if mode == "train":
        accumulation = trainer.current_gradient_accumulation_steps
    else:
        accumulation = 1.0
    denominators = denominators_of(trainer, inputs, batch.mask.size(0) * accumulation, accumulation)
    loss = scalar_loss(trainer, batch, denominators)
    trainer.exact_update.weights.add(loss, batch.logps, batch.mask, inputs)
    entropy = trainer.exact_update.entropy
    loss = entropy.added(loss, batch, denominators)
    entropy.record(1, accumulation)
    book = trainer.recorder.book(mode)
    record_tokens(trainer, book, batch)
    if mode == "train":
        prompts, completions = row_lengths(inputs)
        record_without_gradient(book, batch, with_gradient(loss, batch), prompts + completions)
    if router_loss is not None:  # mixture of experts: load balancing, as TRL adds it
        loss = loss + trainer.router_aux_loss_coef * router_loss / accumulation
        book.add("aux_loss", router_loss, 1.0)
    step_ends = bool(trainer.accelerator.sync_gradients)
    if mode == "train" and step_ends:
        entropy.end_step()
    book.reduce(trainer.accelerator, step_ends=mode == "eval" or step_ends)
    return loss
