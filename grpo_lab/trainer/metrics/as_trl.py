"""TRL's own definition of its metrics, in force where ``objective`` is unset, so that a drop-in logs the same numbers.

    mean        of the micro-batches' means: each micro-batch of the step has a pair of its own, and their ratios are
                averaged
    over rows   rows without loss tokens count as well (TRL takes any ``[B, 1]`` for one value a row)
    nothing     a micro-batch without any loss token has the mean 0 and takes part; in an extreme over rows it does not
    sampling/*  of a generation batch at a time

A bin holds rows of several micro-batches; ``Origin`` says whose they are. All that this package knows of the second
definition stands here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_lab.trainer.metrics.book import EXTREMES, LeftOut, MetricBook, Origin
from grpo_lab.trainer.trl_bridge import SAMPLING_METRICS

#: count of a micro-batch without loss tokens: its mean is 0 and it takes part in a mean of means
NOTHING = 1e-9


class TrlBook(MetricBook):
    """Means of micro-batch means, as TRL has them."""

    def add_zeros(self, name: str, left_out: LeftOut, of_rows: bool) -> None:
        """A micro-batch that is one token wide counts rows for tokens."""
        of_rows = of_rows or left_out.width == 1
        with_tokens = self._per_place(name, left_out.skipped & (left_out.tokens > 0), left_out.origin)
        rows = self._per_place(name, left_out.skipped, left_out.origin)
        tokens = self._per_place(name, left_out.tokens * left_out.skipped, left_out.origin)
        self.add(name, torch.zeros_like(rows), rows if of_rows else tokens + self._empty(name, left_out))
        if name in EXTREMES:
            extreme, how = EXTREMES[name]
            seen = rows if of_rows else with_tokens
            self.add_extreme(extreme, how, torch.where(seen > 0, 0.0, torch.inf if how == "min" else -torch.inf))

    def add_unseen(self, name: str, left_out: LeftOut) -> None:
        """Micro-batches without any loss token have the mean 0."""
        empty = self._empty(name, left_out)
        self.add(name, torch.zeros_like(empty), empty)

    def read(self) -> dict[str, float]:
        """An extreme over rows of which none had a loss token is NaN, as TRL's ``nanmin`` and ``nanmax`` have it."""
        extremes = [name for name, _ in EXTREMES.values() if name in self._total]
        return dict.fromkeys(extremes, math.nan) | super().read()

    def reduce(self, accelerator: Any, step_ends: bool = True) -> None:
        """Each micro-batch is a mean: nothing waits."""
        super().reduce(accelerator)

    def _empty(self, name: str, left_out: LeftOut) -> Tensor:
        return (self._per_place(name, left_out.tokens, left_out.origin) == 0) * NOTHING

    def _settle(self, name: str, pairs: Tensor) -> None:
        seen = pairs[:, 1] > 0
        ratios = torch.where(seen, pairs[:, 0] / pairs[:, 1].clamp(min=1e-9), pairs[:, 0])
        super()._settle(name, torch.stack([ratios, seen.float()], dim=1))

    def _weights(self, values: Tensor, mask: Tensor, origin: Origin | None) -> Tensor:
        as_cut = origin is None and values.size(1) == 1
        return torch.ones_like(mask[:, :1]) if as_cut else super()._weights(values, mask, origin)

    def _places(self, name: str, rows: Tensor, origin: Origin | None) -> tuple[Tensor, int]:
        if origin is None:
            return super()._places(name, rows, origin)
        whole = name in SAMPLING_METRICS
        return origin.micro_batch // origin.every if whole else origin.micro_batch, origin.count

    def _sizes(self, counts: Tensor, origin: Origin | None) -> Tensor:
        return counts.clamp(min=NOTHING) if origin is None else counts
