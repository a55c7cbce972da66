"""Metrics as results: a mean is a (sum, count) pair until the moment it is logged.

Pairs accumulate on the device; once per optimizer step one collective adds them up over ranks. Nothing asks the device
for a number (``.item()``) before ``read``.

Over what a mean goes: over all tokens (or rows, groups) since the last log. With ``objective`` unset TRL's own definition
is in force, which is a mean of micro-batch means; there each micro-batch of the step has a pair of its own (K pairs), and
their ratios are averaged. TRL's means over rows count rows without loss tokens as well, and a micro-batch without any loss
token counts as 0. ``docs/metrics.md`` lists every metric.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lab.verifiers.correct import CORRECT_FROM

#: count of a micro-batch without loss tokens: its mean is 0 and it takes part in a mean of means
NOTHING = 1e-9

#: mean → (name of the extreme over rows that TRL logs beside it, how it combines)
EXTREMES: dict[str, tuple[str, str]] = {
    "clip_ratio/low_mean": ("clip_ratio/low_min", "min"),
    "clip_ratio/high_mean": ("clip_ratio/high_max", "max"),
}


@dataclass(frozen=True)
class LeftOut:
    """Rows of an optimizer step that were not computed, per micro-batch ``[K]`` (one rank speaks for all).

    Args:
        tokens: their loss tokens.
        rows: how many rows a mean over rows counts (TRL's definition: also those without loss tokens).
        rows_with_tokens: those of them that have loss tokens.
        without_tokens: bool, the whole micro-batch has no loss token.
        one_token_wide: TRL's definition is in force and its micro-batches are one token wide: it counts rows for tokens.
    """

    tokens: Tensor
    rows: Tensor
    rows_with_tokens: Tensor
    without_tokens: Tensor
    one_token_wide: bool = False


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
        """Add this rank's ``total`` over ``count`` items to the mean called ``name``; scalars, or ``[K]`` per micro-batch."""
        pair = _pair(total, count)
        self._fresh[name] = self._fresh[name] + pair if name in self._fresh else pair

    def add_alike(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """The same for a pair that every rank computed from the same gathered table: taken once, not added up over ranks."""
        self._settle(name, _pair(total, count))

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

    def read(self) -> dict[str, float]:
        """The means since the last ``read``; forgets them. A mean over nothing is left out."""
        pairs = {name: pair.tolist() for name, pair in self._total.items()}
        self._total.clear()
        return {name: total / count for name, (total, count) in pairs.items() if count > 0}

    def forget(self) -> None:
        """Drop everything since the last ``read``."""
        self._fresh.clear()
        self._fresh_extremes.clear()
        self._total.clear()

    def pending(self) -> dict[str, list[Any]]:
        """What ``read`` would read, for a checkpoint in JSON: name → [sum, count, whether it is on the CPU]."""
        return {name: [*pair.tolist(), pair.device.type == "cpu"] for name, pair in self._total.items()}

    def take_up(self, pending: dict[str, list[Any]], device: torch.device) -> None:
        """Go on from what ``pending`` gave."""
        for name, (total, count, on_cpu) in pending.items():
            self._total[name] = torch.tensor([total, count], device="cpu" if on_cpu else device)

    def _settle(self, name: str, pairs: Tensor) -> None:
        if self.mean_of_means:
            seen = pairs[:, 1] > 0
            pairs = torch.stack(
                [torch.where(seen, pairs[:, 0] / pairs[:, 1].clamp(min=1e-9), pairs[:, 0]), seen.float()], dim=1
            )
        pair = pairs.sum(0)
        self._total[name] = self._total[name] + pair if name in self._total else pair


def _pair(total: Tensor, count: Tensor | float) -> Tensor:
    total = total.detach().float().reshape(-1)
    return torch.stack([total, torch.as_tensor(count, device=total.device).float().reshape(-1)], dim=1)


@contextlib.contextmanager
def unrecorded(trainer: Any) -> Iterator[None]:
    """Inside the block nothing reaches the log: a team's ``token_loss`` may record metrics, also of a toy batch it is asked about."""
    trls, ours = trainer._metrics, trainer.recorder.books
    trainer._metrics = {mode: defaultdict(list) for mode in trls}
    trainer.recorder.books = {mode: MetricBook(book.mean_of_means) for mode, book in ours.items()}
    try:
        yield
    finally:
        trainer._metrics, trainer.recorder.books = trls, ours


def add_token_metric(
    book: MetricBook, name: str, values: Tensor, mask: Tensor, slots: Tensor | None = None, num_slots: int = 1
) -> None:
    """Mean over loss tokens of ``values`` ``[B, T]``, or over rows of ``[B, 1]``.

    Args:
        slots: long ``[B]``, the micro-batch that TRL had each row in (mean of means); ``None``: all in one.
        num_slots: K.

    Where T is 1 both readings are the same number: a row has one loss token or none. Only TRL's own definition counts a row
    without loss tokens there (it takes any ``[B, 1]`` for one value a row), and so do we where that is in force.

    TRL's extremes over rows (``clip_ratio/low_min``, ``clip_ratio/high_max``) follow their mean.
    """
    stock = book.mean_of_means and slots is None  # a micro-batch as TRL cut it, measured as TRL does
    weights = mask
    if values.size(1) == 1:
        weights = torch.ones_like(mask[:, :1]) if stock else mask.any(dim=1, keepdim=True)
    selected = values.float().masked_fill(~weights, 0.0)
    totals, counts = selected.sum(1), weights.sum(1).float()
    if slots is None:
        slots = torch.zeros(mask.size(0), dtype=torch.long, device=mask.device)
    zeros = totals.new_zeros(num_slots)
    sizes = zeros.index_add(0, slots, counts)
    book.add(name, zeros.index_add(0, slots, totals), sizes.clamp(min=NOTHING) if stock else sizes)
    if name in EXTREMES:
        extreme, how = EXTREMES[name]
        means = totals / counts.clamp(min=1)
        add_extreme_metric(book, extreme, how, means.unsqueeze(1), (counts > 0).unsqueeze(1), slots, num_slots)


def add_extreme_metric(
    book: MetricBook,
    name: str,
    how: str,
    values: Tensor,
    where: Tensor,
    slots: Tensor | None = None,
    num_slots: int = 1,
) -> None:
    """``min`` or ``max`` of ``values`` ``[B, ·]`` where ``where``, in each of the K micro-batches (``slots`` ``[B]``)."""
    worst = torch.inf if how == "min" else -torch.inf
    values = values.float().masked_fill(~where, worst)
    rows = values.amin(1) if how == "min" else values.amax(1)
    if slots is None:
        slots = torch.zeros(rows.size(0), dtype=torch.long, device=rows.device)
    found = torch.full((num_slots,), worst, device=rows.device)
    book.add_extreme(name, how, found.scatter_reduce(0, slots, rows, "amin" if how == "min" else "amax"))


def reward_metrics(book: MetricBook, dead: Tensor, lengths: Tensor, truncated: Tensor, correct: Tensor | None) -> None:
    """Metrics of one generation batch, from tables that are the same on every rank.

    Args:
        dead: bool ``[groups]``, all rewards of the group equal.
        lengths: tokens that the policy made ``[N]`` (no tool output), as TRL's ``completions/mean_length`` counts them.
        truncated: bool ``[N]``, ended by the length limit.
        correct: ``[N]`` scores of the correctness reward, where the run has one; correct from ``CORRECT_FROM`` on, NaN unscorable.
    """
    book.add_alike("groups/dead_share", dead.sum(), dead.numel())
    book.add_alike("completions/truncated_share", truncated.sum(), truncated.numel())
    if correct is not None:
        for name, chosen in (("correct", correct >= CORRECT_FROM), ("incorrect", correct < CORRECT_FROM)):
            book.add_alike(f"completions/mean_length_{name}", lengths[chosen].sum(), chosen.sum())
        book.add_alike("rewards/unscorable_share", correct.isnan().sum(), correct.numel())
