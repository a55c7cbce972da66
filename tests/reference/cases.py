"""Random float64 batches for tests of the pure rooms, and the same batch as rows for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.advantages import level_of
from grpo_lab.batch import SAMPLER_LOGPS, Denominators, RewardTable, TokenBatch
from grpo_lab.objectives import SURROGATES, log_ratio
from reference.oracle import Row

COUNTS = {"rows": 6.0, "tokens": 17.0, "budget": 9.0, "micro_batches": 3.0, "prompts": 2.0, "group_tokens": 7.0}
"""Denominators, by name for the oracle."""
DENOMINATORS = Denominators(**COUNTS)
SELECTIONS = [part.selection for part in SURROGATES.values() if hasattr(part, "selection")]


def applied(rule: Any, rewards: Tensor, size: int, lengths: Tensor | None = None) -> Tensor:
    """The advantages of a rule of level ``row`` or ``table``; completions have 1 to 6 tokens unless ``lengths`` are
    given."""
    if level_of(rule) == "row":
        return rule(rewards, size)  # type: ignore[no-any-return]
    if lengths is None:
        lengths = torch.tensor(some_lengths(rewards.numel()))
    return rule(RewardTable(rewards.unsqueeze(1), ("r",), torch.ones(1), size, lengths=lengths))  # type: ignore[no-any-return]


def some_lengths(rows: int) -> list[int]:
    return [1 + 5 * row % 7 % 6 for row in range(rows)]


def random_batch(
    seed: int = 0,
    rows: int = 5,
    width: int = 6,
    ratio: str = "token",
    per_token: bool = False,
    weights: str | None = None,
    empty_row: bool = True,
    spread: float = 0.5,
) -> TokenBatch:
    """A batch with holes in its mask (tool outputs), a row without any loss token, ratios on both sides of every clip,
    a sampler beside the proximal policy, and chosen tokens.

    Args:
        per_token: advantages ``[B, T]`` instead of ``[B, 1]``.
        weights: sampler weights: ``None``, ``"token"`` ``[B, T]`` or ``"sequence"`` ``[B, 1]``.
        spread: standard deviation of log π − log π_old.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    mask = torch.rand(rows, width, generator=random) < 0.7
    mask[:, 0] = True
    if empty_row:
        mask[-1] = False
    logps = (-normal(rows, width).abs() - 0.05).requires_grad_()
    old = logps.detach() - spread * normal(rows, width)
    ref = logps.detach() + 0.3 * normal(rows, width)
    advantages = normal(rows, width if per_token else 1)
    shapes = {None: None, "token": (rows, width), "sequence": (rows, 1)}
    shape = shapes[weights]
    entropies = normal(rows, width).abs()
    sampler_weights = None if shape is None else normal(*shape).abs()
    sampled = (old + 0.5 * spread * normal(rows, width)).clamp(max=-1e-3)
    chosen = {name: torch.rand(rows, width, generator=random) < 0.3 for name in SELECTIONS}
    return TokenBatch(
        logps=logps,
        proximal_logps=old,
        log_ratio=log_ratio(ratio, logps, old, mask),
        advantages=advantages,
        mask=mask,
        ref_logps=ref,
        entropies=entropies,
        sampler_weights=sampler_weights,
        extras={SAMPLER_LOGPS: sampled if spread else old},
        chosen=chosen,
    )


def oracle_rows(batch: TokenBatch) -> list[Row]:
    """The selected tokens of ``batch``, row by row."""

    def spread(values: Tensor | None) -> list[list[float]]:
        filled = torch.ones(batch.mask.shape, dtype=torch.float64) if values is None else values.detach()
        return filled.expand(batch.mask.shape).tolist()

    columns = [
        spread(values)
        for values in (
            batch.logps, batch.proximal_logps, batch.ref_logps, batch.advantages, batch.sampler_weights,
            batch.sampler_logps,
        )
    ]  # fmt: skip
    taken = batch.mask.tolist()
    rows = []
    for i, take in enumerate(taken):
        chosen = {name: [c for c, is_in in zip(of[i].tolist(), take) if is_in] for name, of in batch.chosen.items()}
        rows.append(Row(*([v for v, is_in in zip(column[i], take) if is_in] for column in columns), chosen))
    return rows


def rebuilt(batch: TokenBatch, ratio: str, **changes: Any) -> TokenBatch:
    """``batch`` with some fields changed, its log-probs a fresh leaf and its log-ratio made anew from both."""
    batch = replace(batch, **changes)
    logps = batch.logps.detach().clone().requires_grad_()
    return replace(batch, logps=logps, log_ratio=log_ratio(ratio, logps, batch.proximal_logps, batch.mask))


def unchosen(batch: TokenBatch) -> TokenBatch:
    """``batch`` without a chosen token."""
    return replace(batch, chosen={name: torch.zeros_like(tokens) for name, tokens in batch.chosen.items()})


def changed(batch: TokenBatch, ratio: str, change: Callable[[Tensor], Tensor]) -> TokenBatch:
    """``batch`` with every field of its rows changed by the same function, ``extras`` and ``chosen`` too."""
    names = ("logps", "proximal_logps", "ref_logps", "advantages", "mask", "entropies", "sampler_weights")
    found = {name: change(value.detach()) for name in names if (value := getattr(batch, name)) is not None}
    tables = {
        name: {key: change(value) for key, value in getattr(batch, name).items()} for name in ("extras", "chosen")
    }
    return rebuilt(batch, ratio, **found, **tables)


def padded(batch: TokenBatch, ratio: str, extra: int, fill: float) -> TokenBatch:
    """``batch`` with ``extra`` masked columns appended that hold ``fill`` in every per-token input."""
    rows, width = batch.mask.shape

    def wider(values: Tensor) -> Tensor:
        if values.size(1) != width or width == 1:
            return values
        return torch.cat([values, values.new_full((rows, extra), 0 if values.dtype == torch.bool else fill)], dim=1)

    return changed(batch, ratio, wider)


def poisoned(batch: TokenBatch, ratio: str, fill: float) -> TokenBatch:
    """``batch`` with ``fill`` at the masked positions of every per-token input."""

    def filled(values: Tensor) -> Tensor:
        if values.shape != batch.mask.shape or values.dtype == torch.bool:
            return values
        return values.masked_fill(~batch.mask, fill)

    return changed(batch, ratio, filled)


def rows_of(batch: TokenBatch, ratio: str, chosen: Tensor) -> TokenBatch:
    """Some rows of ``batch``, in the order of ``chosen``."""
    return changed(batch, ratio, lambda values: values[chosen])
