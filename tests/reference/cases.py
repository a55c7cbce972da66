"""Random float64 batches for tests of the pure rooms, and the same batch as rows for the oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.objectives import log_ratio
from reference.oracle import Row

DENOMINATORS = Denominators(rows=6.0, tokens=17.0, budget=9.0, micro_batches=3.0)
FOUR = (6.0, 17.0, 9.0, 3.0)
"""The same four numbers for the oracle."""


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
    """A batch with holes in its mask (tool outputs), a row without any loss token, ratios on both sides of every clip.

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
    return TokenBatch(
        logps=logps,
        proximal_logps=old,
        log_ratio=log_ratio(ratio, logps, old, mask),
        advantages=advantages,
        mask=mask,
        ref_logps=ref,
        entropies=normal(rows, width).abs(),
        sampler_weights=None if shape is None else normal(*shape).abs(),
    )


def oracle_rows(batch: TokenBatch) -> list[Row]:
    """The selected tokens of ``batch``, row by row."""

    def spread(values: Tensor | None) -> list[list[float]]:
        filled = torch.ones(batch.mask.shape, dtype=torch.float64) if values is None else values.detach()
        return filled.expand(batch.mask.shape).tolist()

    columns = [
        spread(values)
        for values in (batch.logps, batch.proximal_logps, batch.ref_logps, batch.advantages, batch.sampler_weights)
    ]
    chosen = batch.mask.tolist()
    return [
        Row(*([value for value, take in zip(column[i], chosen[i]) if take] for column in columns))
        for i in range(len(chosen))
    ]


def rebuilt(batch: TokenBatch, ratio: str, **changes: Tensor) -> TokenBatch:
    """``batch`` with some fields changed, its log-probs a fresh leaf and its log-ratio made anew from both."""
    batch = replace(batch, **changes)  # type: ignore[arg-type]
    logps = batch.logps.detach().clone().requires_grad_()
    return replace(batch, logps=logps, log_ratio=log_ratio(ratio, logps, batch.proximal_logps, batch.mask))


def padded(batch: TokenBatch, ratio: str, extra: int, fill: float) -> TokenBatch:
    """``batch`` with ``extra`` masked columns appended that hold ``fill`` in every per-token input."""
    width = batch.mask.size(1)

    def wider(values: Tensor | None) -> Tensor | None:
        if values is None or values.size(1) != width or width == 1:
            return values
        return torch.cat([values.detach(), values.new_full((values.size(0), extra), fill)], dim=1)

    mask = torch.cat([batch.mask, torch.zeros(batch.mask.size(0), extra, dtype=torch.bool)], dim=1)
    names = ("logps", "proximal_logps", "ref_logps", "advantages", "entropies", "sampler_weights")
    return rebuilt(batch, ratio, mask=mask, **{name: wider(getattr(batch, name)) for name in names})  # type: ignore[arg-type]


def poisoned(batch: TokenBatch, ratio: str, fill: float) -> TokenBatch:
    """``batch`` with ``fill`` at the masked positions of every per-token input."""
    names = ("logps", "proximal_logps", "ref_logps", "advantages", "entropies", "sampler_weights")
    shape = batch.mask.shape
    changed = {
        name: value.detach().masked_fill(~batch.mask, fill)
        for name in names
        if (value := getattr(batch, name)) is not None and value.shape == shape
    }
    return rebuilt(batch, ratio, **changed)


def rows_of(batch: TokenBatch, ratio: str, chosen: Tensor) -> TokenBatch:
    """Some rows of ``batch``, in the order of ``chosen``."""
    names = ("logps", "proximal_logps", "ref_logps", "advantages", "mask", "entropies", "sampler_weights")
    changed = {name: value.detach()[chosen] for name in names if (value := getattr(batch, name)) is not None}
    return rebuilt(batch, ratio, **changed)
