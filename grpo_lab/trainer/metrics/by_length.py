"""The sampler correction beside the sampling settings: what it cannot correct, and how it goes with completion length.

The correction weighs a completion by π_trainer/π_sampler. The engine's log-probs are those of the distribution that it drew
from: after temperature, and after top-p, top-k, min-p or penalties have cut it and it was renormalised over what was kept. The
trainer divides by the temperature, too, but cuts nothing. With a cut the ratio is then not 1 on-policy, but the
probability that the kept tokens had: below 1 at every token, and smallest where the policy is unsure.
See ``docs/algorithms/sampler_correction.md``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lab.trainer.carried import Carried
from grpo_lab.trainer.metrics.book import MetricBook

QUARTILES = 4


class Bounds(Protocol):
    """The correction in force (``ports.SamplerCorrection``)."""

    @property
    def mode(self) -> str: ...

    @property
    def low(self) -> float | None: ...

    @property
    def high(self) -> float | None: ...


def length_quartiles(lengths: Tensor) -> Tensor:
    """Quartile 0 to 3 of each completion's length among all of the batch, long ``[N]``; equal lengths share one."""
    cuts = torch.quantile(lengths.float(), torch.tensor([0.25, 0.5, 0.75], device=lengths.device))
    return torch.bucketize(lengths.float(), cuts)


def kept_by_bounds(weights: Tensor, mode: str, low: float | None, high: float | None) -> Tensor:
    """bool like ``weights``: the ratio lay within the bounds (``*_mask`` sets others to 0, ``*_truncate`` to the bound)."""
    if mode.endswith("mask"):
        return weights != 0
    kept = torch.ones_like(weights, dtype=torch.bool)
    if low is not None:
        kept &= weights > low
    if high is not None:
        kept &= weights < high
    return kept


def by_length(weights: Tensor, mask: Tensor, quartiles: Tensor, kept: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts of the weights and of what was kept, per quartile of completion length.

    Args:
        weights: ``[B, T]`` per token, or ``[B, 1]`` per completion; then completions are counted.
        mask: bool ``[B, T]``, tokens that carry loss.
        quartiles: long ``[B]``.
        kept: bool like ``weights``.
    """
    chosen = mask.any(1, keepdim=True) if weights.size(1) == 1 else mask
    pairs = {}
    for quartile in range(QUARTILES):
        where = chosen & (quartiles == quartile).unsqueeze(1)
        count = where.sum()
        pairs[f"sampling/ratio_mean/len_q{quartile + 1}"] = (weights.float().masked_fill(~where, 0.0).sum(), count)
        pairs[f"sampling/kept_share/len_q{quartile + 1}"] = ((kept & where).sum(), count)
    return pairs


def add_by_length(book: MetricBook, how: Bounds, weights: Tensor, mask: Tensor, quartiles: Tensor) -> None:
    """``by_length`` of some rows into the book, this rank's share."""
    kept = kept_by_bounds(weights, how.mode, how.low, how.high)
    for name, (total, count) in by_length(weights, mask, quartiles, kept).items():
        book.add(name, total, count)


def record_by_length(trainer: Any, output: dict[str, Any], mask: Tensor, mode: str) -> None:
    """``by_length`` of a generation batch whose weights TRL made, gathered over ranks."""
    carried, how = Carried(output), trainer.correction
    weights, quartiles = carried.sampler_weights, carried.length_quartile
    assert weights is not None
    assert quartiles is not None
    pairs = by_length(weights, mask, quartiles, kept_by_bounds(weights, how.mode, how.low, how.high))
    local = torch.stack([torch.stack([total.float(), count.float()]) for total, count in pairs.values()])
    sums = trainer.accelerator.gather(local.unsqueeze(0)).sum(0)
    book = trainer.recorder.book(mode)
    for name, (total, count) in zip(pairs, sums, strict=True):
        book.add_alike(name, total, count)
