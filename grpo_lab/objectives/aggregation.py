"""Aggregations: per-token losses → one scalar.

All but ``local_token_mean`` divide by counts that the trainer made over the whole optimizer step and all ranks
(``Denominators``). They are plain sums over tokens times constants, so the gradient does not depend on how rows were
cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_lab import registry
from grpo_lab.batch import Denominators, masked_row_mean, masked_sum

Aggregation = Callable[[Tensor, Tensor, Denominators], Tensor]
"""``aggregate(per_token_loss [B, T], mask [B, T], denominators) -> scalar``. One with an attribute ``local_denominator
= True`` divides by what is in the local micro-batch, by definition; then rows stay in the micro-batches that TRL cuts.
One with ``per_prompt = True`` reads ``denominators.group_tokens``, which are counted only then."""
Rows = list[list[float]]
RESERVED = ("name",)
"""Keys of ``aggregation: {…}`` that cannot be knobs."""


def sequence_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """1/rows Σ_i 1/|o_i| Σ_t loss: every completion counts the same, so tokens of long ones count less.

    Source: GRPO (arXiv 2402.03300, eq. 3), GSPO.
    """
    return masked_row_mean(loss, mask).sum() / denominators.rows


def token_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """1/tokens Σ_i Σ_t loss over the tokens of the optimizer batch: every token counts the same.

    Source: DAPO (arXiv 2503.14476, eq. 8). As in TRL, ``tokens`` is counted over the generation batch and rescaled to
    one accumulation window. It is ``[B, 1]`` if the rows of one step come from several generation batches.
    """
    tokens = denominators.tokens
    if isinstance(tokens, Tensor) and tokens.dim() > 0:
        return masked_sum(loss / tokens, mask)
    return masked_sum(loss, mask) / tokens


def local_token_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Token mean of each micro-batch, averaged over micro-batches; TRL's ``bnpo``.

    *By definition* it depends on how rows are cut into micro-batches, so the exact update leaves them as TRL cut them.
    """
    return masked_sum(loss, mask) / mask.sum().clamp(min=1) / denominators.micro_batches


local_token_mean.__dict__["local_denominator"] = True


def fixed_budget(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """1/(rows · budget) Σ_i Σ_t loss with the constant generation budget: no length bias.

    Source: Dr.GRPO (arXiv 2503.20783, §3.2 and Listing 1).
    """
    return masked_sum(loss, mask) / (denominators.rows * denominators.budget)


def sequence_sum(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """1/rows Σ_i Σ_t loss: the mean over completions of their summed losses, so a longer response weighs more.

    Source: Kimi k1.5 (arXiv 2501.12599, section 2.3.2, eq. 3). ``fixed_budget`` without the constant budget.
    """
    return masked_sum(loss, mask) / denominators.rows


def prompt_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """1/prompts Σ_i Σ_t loss / (tokens of all completions of i's prompt): every prompt counts the same, and all its
    tokens.

    Source: ScaleRL (arXiv 2510.13786, section 4, "prompt-level loss aggregation"). The tokens of a prompt are counted
    when it is generated, over all ranks, before a row is left out; so is the number of prompts. An optimizer step that
    trains on a part of a prompt's completions (TRL shuffles rows) gets their part of that prompt's mean.
    """
    shares = loss / torch.as_tensor(denominators.group_tokens, device=loss.device).clamp(min=1)
    return masked_sum(shares, mask) / denominators.prompts


prompt_mean.__dict__["per_prompt"] = True

AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "local_token_mean": local_token_mean,
    "fixed_budget": fixed_budget,
    "sequence_sum": sequence_sum,
    "prompt_mean": prompt_mean,
}

#: Aggregation → the same over single floats, ``literal(rows of tokens, denominators) -> float``, for the start-up
#: proof.
LITERALS: dict[Aggregation, Callable[[Rows, Denominators], float]] = {
    sequence_mean: lambda rows, d: sum(sum(row) / len(row) for row in rows) / d.rows,
    token_mean: lambda rows, d: sum(map(sum, rows)) / float(d.tokens),
    local_token_mean: lambda rows, d: sum(map(sum, rows)) / sum(map(len, rows)) / d.micro_batches,
    fixed_budget: lambda rows, d: sum(map(sum, rows)) / (d.rows * d.budget),
    sequence_sum: lambda rows, d: sum(map(sum, rows)) / d.rows,
    prompt_mean: lambda rows, d: sum(map(sum, rows)) / float(d.group_tokens) / d.prompts,
}


def aggregation(name: str, **knobs: Any) -> Aggregation:
    """Return the aggregation called ``name``, built with its knobs if it is a dataclass."""
    made: Aggregation = registry.built(registry.found(AGGREGATIONS, name, "aggregation"), knobs, "aggregation")
    return made


def register_aggregation(name: str, part: Any = None) -> Any:
    """Register ``part`` under ``name``, so that ``aggregation: name`` selects it. Also usable as a decorator.

    ``part`` is a function, or a dataclass whose fields are its knobs. Raises ValueError if another object has the name
    already, or the part cannot be called.
    """
    if part is None:
        return lambda later: register_aggregation(name, later)
    return registry.add(AGGREGATIONS, name, part, RESERVED, "aggregation")
