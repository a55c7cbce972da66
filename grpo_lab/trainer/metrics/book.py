"""Metrics of a run: a mean is kept as a (sum, count) pair until the moment it is logged.

Pairs accumulate on the device; once per optimizer step one collective adds them up over ranks. Nothing is read from the
device (``.item()``) before ``read``. Callers hand over values, masks and the micro-batch of each row (``Origin``); the
book computes the metrics. ``docs/metrics.md`` lists every metric.

``MetricBook`` averages over all tokens (or rows, groups) since the last log. With ``objective`` unset, ``TrlBook`` is
used, so that a drop-in run logs TRL's numbers, which are defined in another way:

    a mean             is the mean of the micro-batches' means, so each micro-batch has a pair of its own
    a mean over rows   counts rows without loss tokens, too (TRL takes any ``[B, 1]`` for one value a row)
    no loss tokens     a micro-batch without any counts with a mean of 0, but not in an extreme over rows
    ``sampling/*``     is the mean of the generation batches' means

``by_length`` shows how the sampler correction π_trainer/π_sampler depends on completion length
(docs/algorithms/sampler_correction.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lab.objectives.corrections import Correction, kept
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import Carried
from grpo_lab.trainer.trl_bridge import SAMPLING_METRICS
from grpo_lab.verifiers.verdict import CORRECT_FROM

#: Name of a mean → name of the extreme over rows that TRL logs beside it, and whether that is the ``min`` or ``max``.
EXTREMES: dict[str, tuple[str, str]] = {
    "clip_ratio/low_mean": ("clip_ratio/low_min", "min"),
    "clip_ratio/high_mean": ("clip_ratio/high_max", "max"),
}
#: Value of an extreme before any row is seen.
WORST = {"min": math.inf, "max": -math.inf}
QUARTILES = 4


@dataclass(frozen=True)
class Origin:
    """Origin of the rows of a bin in the micro-batches that TRL cut.

    Attributes:
        micro_batch: long ``[B]``, the micro-batch of the optimizer step in which TRL had each row, from 0.
        count: number of micro-batches in the step.
        every: number of micro-batches that are trained on per generation batch.
    """

    micro_batch: Tensor
    count: int
    every: int


@dataclass(frozen=True)
class LeftOut:
    """The rows of an optimizer step, and which of them were not computed.

    Attributes:
        tokens: long ``[N]``, the number of loss tokens of each row.
        skipped: bool ``[N]``, whether the row was not computed; True on one rank only, so that each row counts once.
        origin: where the rows come from.
        width: number of completion tokens to which the step's rows are padded.
    """

    tokens: Tensor
    skipped: Tensor
    origin: Origin
    width: int


class MetricBook:
    """Metrics of one mode (train or eval), as pairs (sum, count) over micro-batches, ranks and the steps since the last
    log. Pairs of this rank wait until ``reduce`` adds them up over ranks; ``read`` returns the means.

    A metric has K pairs per optimizer step: 1 here, one for each micro-batch in ``TrlBook`` (``_places``).
    """

    #: Count that a micro-batch without loss tokens has.
    empty = 0.0

    def __init__(self) -> None:
        self._fresh: dict[str, Tensor] = {}  # this rank, since the last reduction: name -> [K, 2]
        self._fresh_extremes: dict[tuple[str, str], Tensor] = {}  # (name, how) -> [K]
        self._total: dict[str, Tensor] = {}  # [2]

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add this rank's sum ``total`` of ``count`` items to the mean ``name``; both are scalars or ``[K]``."""
        pair = _pair(total, count)
        self._fresh[name] = self._fresh[name] + pair if name in self._fresh else pair

    def add_alike(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add a pair that every rank computed from the same gathered values: it is not added up over ranks."""
        self._settle(name, _pair(total, count))

    def add_tokens(self, name: str, values: Tensor, mask: Tensor, origin: Origin | None = None) -> None:
        """Add this rank's ``values`` to the mean ``name``, and update its extreme if it has one.

        Args:
            values: ``[B, T]``, averaged over loss tokens, or ``[B, 1]``, averaged over rows. (If T is 1 both mean the
                same: a row has one loss token or none.)
            mask: bool ``[B, T]``, loss tokens.
            origin: where the rows of a bin come from; None for a micro-batch as TRL cut it.
        """
        weights = self._weights(values, mask, origin)
        selected = values.float().masked_fill(~weights, 0.0)
        totals = selected.sum(1)
        counts = weights.sum(1).float()
        places, number = self._places(name, totals, origin)
        zeros = totals.new_zeros(number)
        sizes = zeros.index_add(0, places, counts)
        self.add(name, zeros.index_add(0, places, totals), sizes if origin else sizes.clamp(min=self.empty))
        if name in EXTREMES:
            means = totals / counts.clamp(min=1)
            self.add_worst(*EXTREMES[name], means.unsqueeze(1), (counts > 0).unsqueeze(1), origin)

    def add_worst(self, name: str, how: str, values: Tensor, where: Tensor, origin: Origin | None = None) -> None:
        """Update the extreme ``name`` by the ``how`` (``min`` or ``max``) of those ``values`` ``[B, ·]`` at which
        ``where`` is True."""
        values = values.detach().float().masked_fill(~where, WORST[how])
        rows = values.amin(1) if how == "min" else values.amax(1)
        places, number = self._places(name, rows, origin)
        found = torch.full((number,), WORST[how], device=rows.device)
        self._add_extreme(name, how, found.scatter_reduce(0, places, rows, f"a{how}"))

    def add_zeros(self, name: str, left_out: LeftOut, of_rows: bool) -> None:
        """Count zeros for the rows that were not computed, since their values are known to be 0, in a mean over rows
        (``of_rows``) or over loss tokens."""
        rows = self._per_place(name, left_out.skipped & (left_out.tokens > 0), left_out.origin)
        self._zeros(name, rows if of_rows else self._skipped_tokens(name, left_out), rows)

    def add_unseen(self, name: str, left_out: LeftOut) -> None:
        """Do nothing about rows that were not computed, in a mean over computed rows only. (``TrlBook`` counts empty
        micro-batches here.)"""

    def reduce(self, accelerator: Any, step_ends: bool = True) -> dict[str, Tensor]:
        """Add up this rank's pairs over all ranks, in one gather for all metrics, if the optimizer step ends
        (``step_ends``); else keep them. All ranks must hold the same names. Return the sums of what was added up: name
        → (sum, count), ``[2]``."""
        names = sorted(self._fresh)
        extremes = sorted(self._fresh_extremes)
        sums: dict[str, Tensor] = {}
        if not step_ends or (not names and not extremes):
            return sums
        parts = [self._fresh[n].reshape(-1) for n in names] + [self._fresh_extremes[k] for k in extremes]
        with named_place("metrics of all ranks"):
            columns = accelerator.gather(torch.cat(parts).unsqueeze(0)).split([part.numel() for part in parts], dim=1)
        for name, column in zip(names, columns[: len(names)], strict=True):
            pairs = column.sum(0).view(-1, 2)
            self._settle(name, pairs)
            sums[name] = pairs.sum(0)
        for (name, how), column in zip(extremes, columns[len(names) :], strict=True):
            found = column.amin(0) if how == "min" else column.amax(0)
            seen = found.isfinite()
            self._settle(name, torch.stack([found.masked_fill(~seen, 0.0), seen.float()], dim=1))
        self._fresh.clear()
        self._fresh_extremes.clear()
        return sums

    def read(self) -> dict[str, float]:
        """Return the means since the last ``read`` and forget them. A mean over nothing is left out."""
        pairs = {name: pair.tolist() for name, pair in self._total.items()}
        self._total.clear()
        return {name: total / count for name, (total, count) in pairs.items() if count > 0}

    def forget(self) -> None:
        """Drop everything since the last ``read``."""
        self._fresh.clear()
        self._fresh_extremes.clear()
        self._total.clear()

    def so_far(self) -> tuple[dict[Any, Tensor], ...]:
        """Return a snapshot of the book for ``go_back``. Pairs are replaced and never changed in place, so copies of
        the dicts do."""
        return dict(self._fresh), dict(self._fresh_extremes), dict(self._total)

    def go_back(self, then: tuple[dict[Any, Tensor], ...]) -> None:
        """Restore the snapshot that ``so_far`` returned."""
        self._fresh, self._fresh_extremes, self._total = map(dict, then)

    def pending(self) -> dict[str, list[Any]]:
        """Return what ``read`` would use, for a checkpoint in JSON: name → [sum, count, whether it is on the CPU]."""
        return {name: [*pair.tolist(), pair.device.type == "cpu"] for name, pair in self._total.items()}

    def take_up(self, pending: dict[str, list[Any]], device: torch.device) -> None:
        """Restore what ``pending`` returned."""
        for name, (total, count, on_cpu) in pending.items():
            self._total[name] = torch.tensor([total, count], device="cpu" if on_cpu else device)

    def _settle(self, name: str, pairs: Tensor) -> None:
        """Add pairs ``[K, 2]`` of all ranks to what ``read`` will return."""
        pair = pairs.sum(0)
        self._total[name] = self._total[name] + pair.to(self._total[name].device) if name in self._total else pair

    def _add_extreme(self, name: str, how: str, values: Tensor) -> None:
        """Merge ``values`` ``[K]`` of this rank into an extreme; its ``WORST`` value means that no row was seen."""
        combine = torch.minimum if how == "min" else torch.maximum
        self._fresh_extremes[name, how] = combine(self._fresh_extremes.get((name, how), values), values)

    def _zeros(self, name: str, counts: Tensor, rows: Tensor) -> None:
        """Add ``counts`` ``[K]`` zeros to the mean, and a zero to its extreme wherever ``rows`` is not 0."""
        self.add(name, torch.zeros_like(counts), counts)
        if name in EXTREMES:
            extreme, how = EXTREMES[name]
            self._add_extreme(extreme, how, torch.where(rows > 0, 0.0, WORST[how]))

    def _per_place(self, name: str, values: Tensor, origin: Origin) -> Tensor:
        """Return the sums ``[K]`` of ``values`` ``[B]`` over the rows of each pair."""
        places, number = self._places(name, values, origin)
        return torch.zeros(number, device=values.device).index_add(0, places, values.float())

    def _skipped_tokens(self, name: str, left_out: LeftOut) -> Tensor:
        """Return the number of loss tokens in rows that were not computed, ``[K]``."""
        return self._per_place(name, left_out.tokens * left_out.skipped, left_out.origin)

    def _weights(self, values: Tensor, mask: Tensor, origin: Origin | None) -> Tensor:
        """Return bool, shaped like ``values``: which of them count."""
        if values.size(1) == 1:
            return mask.any(dim=1, keepdim=True)
        return mask

    def _places(self, name: str, rows: Tensor, origin: Origin | None) -> tuple[Tensor, int]:
        """Return the index, among K pairs, of the pair to which each row is added (long ``[B]``), and K."""
        return torch.zeros(rows.size(0), dtype=torch.long, device=rows.device), 1


class TrlBook(MetricBook):
    """Metric book of a drop-in run: means of micro-batch means, as TRL defines them (the module's docstring). Nothing
    else in this package knows that definition."""

    #: Not 0, so that the mean 0 of an empty micro-batch counts in the mean of means.
    empty = 1e-9

    def add_zeros(self, name: str, left_out: LeftOut, of_rows: bool) -> None:
        """Count zeros as TRL does: micro-batches without loss tokens count, and if rows are one token wide, rows count
        in place of tokens."""
        if of_rows or left_out.width == 1:
            counts = rows = self._per_place(name, left_out.skipped, left_out.origin)
        else:
            counts = self._skipped_tokens(name, left_out) + self._empty(name, left_out)
            rows = self._per_place(name, left_out.skipped & (left_out.tokens > 0), left_out.origin)
        self._zeros(name, counts, rows)

    def add_unseen(self, name: str, left_out: LeftOut) -> None:
        """Add a mean of 0 for each micro-batch without any loss token."""
        empty = self._empty(name, left_out)
        self.add(name, torch.zeros_like(empty), empty)

    def read(self) -> dict[str, float]:
        """Return the means since the last ``read`` and forget them. An extreme over rows of which none has a loss token
        is NaN, as in TRL (``nanmin``)."""
        extremes = [name for name, _ in EXTREMES.values() if name in self._total]
        return dict.fromkeys(extremes, math.nan) | super().read()

    def reduce(self, accelerator: Any, step_ends: bool = True) -> dict[str, Tensor]:
        """Add up the pairs over ranks now, whether the optimizer step ends or not: each micro-batch is a mean of its
        own."""
        return super().reduce(accelerator)

    def _empty(self, name: str, left_out: LeftOut) -> Tensor:
        """Return the counts ``[K]`` of micro-batches without loss tokens: ``empty`` for each of them, else 0."""
        return (self._per_place(name, left_out.tokens, left_out.origin) == 0) * self.empty

    def _settle(self, name: str, pairs: Tensor) -> None:
        """Add the means of pairs ``[K, 2]``, each with a count of 1; a pair without a count is left out."""
        seen = pairs[:, 1] > 0
        ratios = torch.where(seen, pairs[:, 0] / pairs[:, 1].clamp(min=self.empty), pairs[:, 0])
        super()._settle(name, torch.stack([ratios, seen.float()], dim=1))

    def _weights(self, values: Tensor, mask: Tensor, origin: Origin | None) -> Tensor:
        as_cut = origin is None and values.size(1) == 1
        if as_cut:
            return torch.ones_like(mask[:, :1])
        return super()._weights(values, mask, origin)

    def _places(self, name: str, rows: Tensor, origin: Origin | None) -> tuple[Tensor, int]:
        if origin is None:
            return super()._places(name, rows, origin)
        places = origin.micro_batch
        if name in SAMPLING_METRICS:  # a pair for each generation batch
            places = places // origin.every
        return places, origin.count


def _pair(total: Tensor, count: Tensor | float) -> Tensor:
    """Return float32 ``[K, 2]`` of sums and counts, each a scalar or ``[K]``."""
    total = total.detach().float().reshape(-1)
    return torch.stack([total, torch.as_tensor(count, device=total.device).float().reshape(-1)], dim=1)


def reward_metrics(book: MetricBook, dead: Tensor, lengths: Tensor, truncated: Tensor, correct: Tensor | None) -> None:
    """Add the metrics of one generation batch (``groups/…``, ``completions/…``) from tensors that are the same on every
    rank.

    Args:
        dead: bool ``[groups]``, whether all rewards of the group are equal.
        lengths: ``[N]``, tokens that the policy made, without tool output, as TRL's ``completions/mean_length`` counts
            them.
        truncated: bool ``[N]``, whether the length limit cut the completion.
        correct: ``[N]``, scores of the correctness reward: right from ``CORRECT_FROM`` on, NaN if unscorable. None if
            the run has no such reward.
    """
    book.add_alike("groups/dead_share", dead.sum(), dead.numel())
    book.add_alike("completions/truncated_share", truncated.sum(), truncated.numel())
    if correct is not None:
        for name, chosen in (("correct", correct >= CORRECT_FROM), ("incorrect", correct < CORRECT_FROM)):
            book.add_alike(f"completions/mean_length_{name}", lengths[chosen].sum(), chosen.sum())
        book.add_alike("rewards/unscorable_share", correct.isnan().sum(), correct.numel())
        groups = correct.view(dead.numel(), -1)  # a NaN is on neither side
        solved = (groups >= CORRECT_FROM).any(1)
        missed = (groups < CORRECT_FROM).any(1)
        book.add_alike("groups/solved_share", solved.sum(), solved.numel())
        book.add_alike("groups/learnable_share", (solved & missed).sum(), solved.numel())


def length_quartiles(lengths: Tensor) -> Tensor:
    """Return the quartile (0 to 3) of each completion's length in the batch, long ``[N]``. Completions of equal length
    are in the same quartile."""
    cuts = torch.quantile(lengths.float(), torch.tensor([0.25, 0.5, 0.75], device=lengths.device))
    return torch.bucketize(lengths.float(), cuts)


def by_length(
    how: Correction, weights: Tensor, mask: Tensor, quartiles: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, sum and count of two metrics per quartile of completion length: the mean weight of the sampler
    correction, and the share of tokens (or completions) that it keeps.

    Args:
        how: the correction.
        weights: ``[B, T]``, one per token, or ``[B, 1]``, one per completion; then completions are counted.
        mask: bool ``[B, T]``, tokens that carry loss.
        quartiles: long ``[B]`` (``length_quartiles``).
    """
    chosen = mask.any(1, keepdim=True) if weights.size(1) == 1 else mask
    for quartile in range(QUARTILES):
        where = chosen & (quartiles == quartile).unsqueeze(1)
        count = where.sum()
        yield f"sampling/ratio_mean/len_q{quartile + 1}", weights.float().masked_fill(~where, 0.0).sum(), count
        yield f"sampling/kept_share/len_q{quartile + 1}", (kept(how, weights) & where).sum(), count


def record_by_length(how: Correction, output: dict[str, Any], mask: Tensor, accelerator: Any, book: MetricBook) -> None:
    """Log ``by_length`` of a generation batch whose sampler weights were computed at generation. ``output``: this
    rank's rows; ``mask``: bool ``[B, T]``, tokens that carry loss. A collective."""
    carried = Carried(output)
    assert carried.sampler_weights is not None
    assert carried.length_quartile is not None
    found = list(by_length(how, carried.sampler_weights, mask, carried.length_quartile))
    local = torch.stack([torch.stack([total.float(), count.float()]) for _, total, count in found])
    sums = accelerator.gather(local.unsqueeze(0)).sum(0)
    for (name, _, _), (total, count) in zip(found, sums, strict=True):
        book.add_alike(name, total, count)
