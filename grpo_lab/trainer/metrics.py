"""Metrics as results: a mean is a (sum, count) pair until the moment it is logged.

Pairs accumulate on the device; once per optimizer step one collective adds them up over ranks. Nothing asks the device
for a number (``.item()``) before ``read``.

Over what a mean goes: over all tokens (or rows, groups) since the last log. With ``objective`` unset TRL's own definition
is in force, which is a mean of micro-batch means; there each micro-batch of the step has a pair of its own (K pairs), and
their ratios are averaged. ``docs/metrics.md`` lists every metric.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: mean → (name of the extreme over rows that TRL logs beside it, how it combines)
EXTREMES: dict[str, tuple[str, str]] = {
    "clip_ratio/low_mean": ("clip_ratio/low_min", "min"),
    "clip_ratio/high_mean": ("clip_ratio/high_max", "max"),
}


class MetricBook:
    """Pairs of one mode (train or eval), over micro-batches, ranks and the steps of a logging window.

    Args:
        mean_of_means: TRL's definition: the pairs of one step are averaged as ratios, not added up.
    """

    def __init__(self, mean_of_means: bool = False) -> None:
        self.mean_of_means = mean_of_means
        self._fresh: dict[str, Tensor] = {}  # this rank, since the last reduction: name -> [K, 2]
        self._fresh_extremes: dict[tuple[str, str], Tensor] = {}  # (name, how) -> [K]
        self._total: dict[str, Tensor] = {}  # [2]

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add ``total`` over ``count`` items to the mean called ``name``; both scalars, or ``[K]`` per micro-batch."""
        total = total.detach().float().reshape(-1)
        counts = torch.as_tensor(count, device=total.device).float().reshape(-1)
        pair = torch.stack([total, counts], dim=1)
        self._fresh[name] = self._fresh[name] + pair if name in self._fresh else pair

    def add_extreme(self, name: str, how: str, values: Tensor) -> None:
        """Take ``values`` ``[K]`` (±inf: none seen) into the ``min`` or ``max`` called ``name``."""
        key, values = (name, how), values.detach().float().reshape(-1)
        before = self._fresh_extremes.get(key, values)
        self._fresh_extremes[key] = torch.minimum(before, values) if how == "min" else torch.maximum(before, values)

    def reduce(self, accelerator: Any) -> None:
        """Add this rank's pairs to everybody's: one gather for all metrics. All ranks must hold the same names."""
        names, extremes = sorted(self._fresh), sorted(self._fresh_extremes)
        if not names and not extremes:
            return
        parts = [self._fresh[n].reshape(-1) for n in names] + [self._fresh_extremes[k] for k in extremes]
        columns = accelerator.gather(torch.cat(parts).unsqueeze(0)).split([part.numel() for part in parts], dim=1)
        for name, column in zip(names, columns[: len(names)], strict=True):
            self._settle(name, column.sum(0).view(-1, 2))
        for (name, how), column in zip(extremes, columns[len(names) :], strict=True):
            found = column.amin(0) if how == "min" else column.amax(0)
            seen = found.isfinite()
            self._settle(name, torch.stack([found.masked_fill(~seen, 0.0), seen.float()], dim=1))
        self._fresh.clear()
        self._fresh_extremes.clear()

    def settle_alike(self) -> None:
        """Take fresh pairs that every rank computed from the same gathered table as they are, without adding them up."""
        for name, pair in self._fresh.items():
            self._settle(name, pair)
        self._fresh.clear()

    def read(self) -> dict[str, float]:
        """The means since the last ``read``; forgets them. A mean over nothing is left out."""
        pairs = {name: pair.tolist() for name, pair in self._total.items()}
        self._total.clear()
        return {name: total / count for name, (total, count) in pairs.items() if count > 0}

    def _settle(self, name: str, pairs: Tensor) -> None:
        if self.mean_of_means:
            seen = pairs[:, 1] > 0
            pairs = torch.stack(
                [torch.where(seen, pairs[:, 0] / pairs[:, 1].clamp(min=1e-9), pairs[:, 0]), seen.float()], dim=1
            )
        pair = pairs.sum(0)
        self._total[name] = self._total[name] + pair if name in self._total else pair


def add_token_metric(
    book: MetricBook, name: str, values: Tensor, mask: Tensor, slots: Tensor | None = None, num_slots: int = 1
) -> None:
    """Mean over loss tokens of ``values`` ``[B, T]``, or over rows of ``[B, 1]``.

    Args:
        slots: long ``[B]``, the micro-batch that TRL had each row in (mean of means); ``None``: all in one.
        num_slots: K.

    TRL's extremes over rows (``clip_ratio/low_min``, ``clip_ratio/high_max``) follow their mean.
    """
    weights = mask.any(dim=1, keepdim=True) if values.size(1) == 1 else mask
    selected = values.float().masked_fill(~weights, 0.0)
    totals, counts = selected.sum(1), weights.sum(1).float()
    if slots is None:
        slots = torch.zeros(mask.size(0), dtype=torch.long, device=mask.device)
    zeros = totals.new_zeros(num_slots)
    book.add(name, zeros.index_add(0, slots, totals), zeros.index_add(0, slots, counts))
    if name in EXTREMES:
        extreme, how = EXTREMES[name]
        worst = torch.inf if how == "min" else -torch.inf
        rows = torch.where(counts > 0, totals / counts.clamp(min=1), torch.full_like(totals, worst))
        book.add_extreme(
            extreme, how, zeros.fill_(worst).scatter_reduce(0, slots, rows, "amin" if how == "min" else "amax")
        )


def reward_metrics(book: MetricBook, dead: Tensor, lengths: Tensor, truncated: Tensor, correct: Tensor | None) -> None:
    """Metrics of one generation batch, from tables that are the same on every rank.

    Args:
        dead: bool ``[groups]``, all rewards of the group equal.
        lengths: tokens ``[N]``.
        truncated: bool ``[N]``, ended by the length limit.
        correct: ``[N]`` 1/0/NaN from the correctness reward, where the run has one.
    """
    book.add("groups/dead_share", dead.sum(), dead.numel())
    book.add("completions/truncated_share", truncated.sum(), truncated.numel())
    if correct is not None:
        for name, chosen in (("correct", correct > 0.5), ("incorrect", correct <= 0.5)):
            book.add(f"completions/mean_length_{name}", lengths[chosen].sum(), chosen.sum())
        book.add("rewards/unscorable_share", correct.isnan().sum(), correct.numel())
    book.settle_alike()
