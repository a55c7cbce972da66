"""Aggregations: per-token losses → one scalar.

All but ``local_token_mean`` divide by counts that the trainer made over the whole optimizer step and all ranks
(``Denominators``). Each of these is a sum over tokens of loss times a constant, so its gradient does not depend on how
rows were cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_lab import registry
from grpo_lab.batch import Denominators, masked_row_mean, masked_sum

Aggregation = Callable[[Tensor, Tensor, Denominators], Tensor]
"""``aggregate(per_token_loss [B, T], mask [B, T], denominators) -> scalar``.

An aggregation with the attribute ``local_denominator = True`` divides by counts of the local micro-batch; rows then
stay in the micro-batches that TRL cuts. One with ``per_prompt = True`` reads ``denominators.group_tokens``, which are
counted only for it.
"""
Rows = list[list[float]]
RESERVED = ("name",)
"""Keys of ``aggregation: {…}`` that cannot be knobs."""


def sequence_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Average over the tokens of each completion, then over completions: 1/rows Σ_i 1/|o_i| Σ_t loss_{i,t}.

    Every completion counts the same, so a token of a long one counts less. Source: GRPO (arXiv 2402.03300, eq. 3),
    GSPO.
    """
    return masked_row_mean(loss, mask).sum() / denominators.rows


def token_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Average over all tokens of the optimizer batch: 1/tokens Σ_i Σ_t loss_{i,t}. Every token counts the same.

    Source: DAPO (arXiv 2503.14476, eq. 8). ``denominators.tokens`` is counted as in TRL: over the generation batch, and
    then rescaled to one accumulation window. It is ``[B, 1]`` if the rows of one step come from several generation
    batches.
    """
    tokens = denominators.tokens
    if isinstance(tokens, Tensor) and tokens.dim() > 0:
        return masked_sum(loss / tokens, mask)
    return masked_sum(loss, mask) / tokens


def local_token_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Average over the tokens of each micro-batch, then over micro-batches; TRL's ``bnpo``.

    By this definition the loss depends on how rows are cut into micro-batches. So the exact update leaves them as TRL
    cut them.
    """
    return masked_sum(loss, mask) / mask.sum().clamp(min=1) / denominators.micro_batches


local_token_mean.__dict__["local_denominator"] = True


def fixed_budget(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Divide the sum over all tokens by a constant: 1/(rows · budget) Σ_i Σ_t loss_{i,t}, where the budget is the
    largest length that a completion may have. Lengths of completions are not divided by, so there is no length bias.

    Source: Dr.GRPO (arXiv 2503.20783, §3.2 and Listing 1).
    """
    return masked_sum(loss, mask) / (denominators.rows * denominators.budget)


def sequence_sum(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Sum over the tokens of each completion, then average over completions: 1/rows Σ_i Σ_t loss_{i,t}. A longer
    completion weighs more.

    Source: Kimi k1.5 (arXiv 2501.12599, section 2.3.2, eq. 3). It is ``fixed_budget`` without the division by the
    budget.
    """
    return masked_sum(loss, mask) / denominators.rows


def prompt_mean(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Average over the tokens of all completions of a prompt, then over prompts: 1/prompts Σ_i Σ_t loss_{i,t} / (tokens
    of all completions of i's prompt). Every prompt counts the same.

    Source: ScaleRL (arXiv 2510.13786, section 4, "prompt-level loss aggregation"). The tokens of a prompt are counted
    at generation, over all ranks; the prompts of a step are its rows divided by the completions per prompt. Both are
    counted before any row is left out. TRL shuffles rows, so an optimizer step may train on only some of a prompt's
    completions; it then gets their part of that prompt's mean.
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

#: Aggregation → its formula over single floats, ``literal(rows, denominators) -> float``, for the start-up proof. In
#: ``rows`` each completion has a list of losses, one a token.
LITERALS: dict[Aggregation, Callable[[Rows, Denominators], float]] = {
    sequence_mean: lambda rows, d: sum(sum(row) / len(row) for row in rows) / d.rows,
    token_mean: lambda rows, d: sum(map(sum, rows)) / float(d.tokens),
    local_token_mean: lambda rows, d: sum(map(sum, rows)) / sum(map(len, rows)) / d.micro_batches,
    fixed_budget: lambda rows, d: sum(map(sum, rows)) / (d.rows * d.budget),
    sequence_sum: lambda rows, d: sum(map(sum, rows)) / d.rows,
    prompt_mean: lambda rows, d: sum(map(sum, rows)) / float(d.group_tokens) / d.prompts,
}


def aggregation(name: str, **knobs: Any) -> Aggregation:
    """Return the aggregation called ``name``, built with its knobs if it is a dataclass. Raises ValueError for an
    unknown name or knob."""
    made: Aggregation = registry.built(registry.found(AGGREGATIONS, name, "aggregation"), knobs, "aggregation")
    return made


def register_aggregation(name: str, part: Any = None) -> Any:
    """Register ``part`` under ``name``, so that ``aggregation: name`` selects it. Also usable as a decorator.

    Args:
        name: the name in recipes.
        part: a function, or a dataclass whose fields are its knobs.

    Raises:
        ValueError: another object has the name already, or the part cannot be called.
    """
    if part is None:
        return lambda later: register_aggregation(name, later)
    return registry.add(AGGREGATIONS, name, part, RESERVED, "aggregation")
