"""Log an optimizer step: what it computed compared with stock TRL, and entropy, KL and diagnostics."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_lab.batch import Denominators, TokenBatch, safe
from grpo_lab.objectives import MixedObjective
from grpo_lab.objectives.value_loss import value_clip_acts, value_loss
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.loss_proof import toy_batch
from grpo_lab.trainer.exactness.update_verdict import UpdateVerdict
from grpo_lab.trainer.metrics.book import LeftOut, MetricBook, Origin, by_length
from grpo_lab.trainer.ports import Numbers, UpdatePort
from grpo_lab.trainer.row_table import Carried, loss_mask, row_lengths
from grpo_lab.trainer.step.row_numbers import RowNumbers, live_rows_of
from grpo_lab.update import Plan, Rows, default_max_tokens, plan_shared, plan_update

NO_GRADIENT_SHARE = "update/no_gradient_share"
SILENT_SHARE = "update/silent_share"


def padded_tokens(batch: dict[str, Any]) -> int:
    """Return the tokens of a micro-batch as TRL cut it, padding included."""
    rows, width = batch["completion_ids"].shape
    return default_max_tokens(rows, batch["prompt_ids"].size(1), width)


class UpdateRecord:
    """Logs ``update/*`` for every optimizer step, however it is computed, and says once per reason why rows are not
    left out."""

    def __init__(self, trainer: UpdatePort) -> None:
        self.trainer = trainer
        #: For each micro-batch that stays as TRL cut it: long ``[rows, 3]`` (prompt tokens, completion tokens, 1 if the
        #: row is live), and its padded tokens.
        self._parts: list[tuple[Tensor, int]] = []
        self._described: dict[str, Any] = {}

    def described(self, found: UpdateVerdict) -> dict[str, Any]:
        """Return the description of the update for ``run.json``.

        Its keys: ``rows`` (``live only``, ``all``), ``batches`` (``bins``, ``as TRL``), ``because`` (the reason),
        ``randomness`` if the update is exact in distribution only, and the first step's token counts.
        """
        return self._described or _described(found)

    def in_bins(
        self, plan: Plan, numbers: RowNumbers, padded: int, found: UpdateVerdict, budget: int, received: int
    ) -> dict[str, Tensor]:
        """Record a step that was computed in bins. A collective. Return the sums of what was recorded since the last
        reduction (``MetricBook.reduce``).

        Args:
            plan: the step's plan.
            numbers: facts about all rows of the step.
            padded: tokens of this rank's micro-batches with their padding, as many as on every rank.
            found: what could be left out.
            budget: tokens that one forward may have.
            received: bytes that came to this rank.
        """
        recorder = self.trainer.recorder
        accelerator = self.trainer.accelerator
        stock = accelerator.num_processes * padded
        rows = sum(len(rows) for rank in plan.bins for rows in rank)
        if accelerator.num_processes > 1:
            moved = torch.tensor([float(received)], device=accelerator.device)
            recorder.book("train").add("update/bytes_moved", moved, 1.0)
        sums = self._record(rows, len(numbers), plan.tokens_live, plan.tokens_computed, stock)
        if found.draws:
            recorder.say(
                "exact update: dropout is active, and its masks are drawn for the rows that are computed: stock's "
                "update in distribution, not number by number (`update.randomness: same_draws` takes stock's draws, in "
                "its batches)",
                key="exact update: same distribution",
            )
        if found.all_rows is None:
            self._described = _described(found, plan.tokens_computed, plan.tokens_computed, stock)
            return sums
        prompts = numbers.prompts if plan.shared else None
        live = numbers.rows(all_rows=False, packed=plan.shared)
        self._say(found, found.all_rows, plan.tokens_computed, live, budget, stock, prompts)
        return sums

    def looked_at(self, tokens: int) -> None:
        """Record the tokens that the step's look forwarded, with padding and over all ranks."""
        self._alike("tokens_looked", tokens, 1)

    def as_trl(self, inputs: dict[str, Any], found: UpdateVerdict, budget: int | None) -> None:
        """Record a micro-batch that stays as TRL cut it. For the last one of an optimizer step this is a collective."""
        accelerator = self.trainer.accelerator
        live = live_rows_of(inputs, loss_mask(inputs))
        self._parts.append((torch.stack([*row_lengths(inputs), live.long()], dim=1), padded_tokens(inputs)))
        if not accelerator.sync_gradients:
            return
        tables, padded = zip(*self._parts, strict=True)
        self._parts = []
        table = torch.cat(tables)
        sizes = torch.tensor([[sum(padded), max(padded)]], device=table.device)
        if accelerator.num_processes > 1:
            table = accelerator.gather(table.contiguous())
            sizes = accelerator.gather(sizes)
        rows = table.size(0)
        computed = int(sizes[:, 0].sum())
        self._record(rows, rows, int(table[:, :2].sum()), computed, computed)
        if found.stock is not None:
            needed = Rows(table[:, 0], table[:, 1], table[:, 2].bool())
            self._say(found, found.stock, computed, needed, budget or int(sizes[:, 1].max()), computed)

    def _say(
        self, found: UpdateVerdict, reason: str, computed: int, rows: Rows, budget: int, stock: int,
        prompts: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Report, once per reason, what is not left out, why, and what it costs: the computed tokens beside those of
        the live rows in bins.

        Args:
            found: the verdict on the step.
            reason: why rows are not left out, or batches not re-cut.
            computed: tokens that the step computed.
            rows: the live rows.
            budget: tokens that one forward may have.
            stock: tokens that stock TRL computes.
            prompts: a number per row, if each prompt is to be counted once.
        """
        recorder = self.trainer.recorder
        key = f"exact update: {reason}"
        if recorder.has_said(key):
            return
        ranks = self.trainer.accelerator.num_processes
        if prompts is None:
            plan = plan_update(rows, ranks, budget)
        else:
            plan = plan_shared(rows, prompts, ranks, budget)
        needed = plan.tokens_computed
        self._described = _described(found, computed, needed, stock)
        if found.stock is not None:
            what = "micro-batches stay as TRL cut them"
        else:
            what = "all rows are computed"
        if needed:
            times = f": {computed / needed:.1f} times as many"
        else:
            times = ", since no row carries an advantage"
        recorder.say(
            f"exact update: {what}: {reason}. This step computed {computed} tokens where live rows in bins have "
            f"{needed}{times}",
            key=key,
            level=logging.INFO if found.chosen else logging.WARNING,
        )

    def _record(self, rows: int, all_rows: int, tokens: int, computed: int, stock: int) -> dict[str, Tensor]:
        """Log the token counts of a step, which are the same on every rank. Return the sums of the reduction. A
        collective.

        Args:
            rows: rows that were computed.
            all_rows: rows of the step.
            tokens: tokens of the computed rows without padding.
            computed: tokens that were computed, with padding.
            stock: tokens that stock TRL computes.
        """
        for name, total, count in (
            ("live_share", rows, all_rows),
            ("padding_share", computed - tokens, max(computed, 1)),
            ("tokens_computed", computed, 1),
            ("tokens_stock", stock, 1),
            ("computed_share", computed, stock),
        ):
            self._alike(name, total, count)
        book = self.trainer.recorder.book("train")
        accelerator = self.trainer.accelerator
        ours = trl_bridge.teams(self.trainer, "_compute_loss") is None
        if self.trainer.algorithm.objective is not None and ours:
            for name in self.trainer.lab_settings.tasks:  # one step more over which the tasks' losses are means
                zero = torch.zeros(1, device=accelerator.device)
                book.add(f"tasks/{name}/loss", zero, 1.0 / accelerator.num_processes)
        return book.reduce(accelerator)

    def _alike(self, name: str, total: int, count: int) -> None:
        """Log a number that every rank knows. Pairs (total, count) are added up over ranks, so each rank adds its
        share."""
        accelerator = self.trainer.accelerator
        mine = 1.0 / accelerator.num_processes
        total_here = torch.tensor([total * mine], device=accelerator.device)
        self.trainer.recorder.book("train").add(f"update/{name}", total_here, count * mine)


def _described(found: UpdateVerdict, *price: int) -> dict[str, Any]:
    """Return the description of a verdict for ``run.json``. ``price``: tokens of the first step: computed, of live rows
    in bins, of stock TRL; empty before it."""
    described = {
        "batches": "bins" if found.stock is None else "as TRL",
        "rows": "live only" if found.stock is None and found.all_rows is None else "all",
        "because": found.stock or found.all_rows,
    }
    randomness = {}
    if found.draws and found.stock is None:
        randomness = {"randomness": "same_distribution"}
    names = ("first_step_tokens", "first_step_tokens_live_in_bins", "first_step_tokens_stock")
    return described | randomness | dict(zip(names, price, strict=False))


def value_targets(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the critic's old values and its returns, ``[B, T]`` and 0 where there are none, and bool ``[B, T]``: where
    there are. A completion that could not be scored has no returns."""
    carried = Carried(dict(batch.extras))
    mask = batch.mask & ~carried.returns.isnan()
    return safe(carried.old_values, mask), safe(carried.returns, mask), mask


@torch.no_grad()
def record_tokens(trainer: Numbers, book: MetricBook, batch: TokenBatch, origin: Origin | None = None) -> None:
    """Log entropy, KL, and the diagnostics of surrogate and critic. ``origin`` says where TRL had the rows of a bin;
    None for a micro-batch as TRL cut it."""
    objective = trainer.algorithm.objective
    critic = trainer.algorithm.value
    assert objective is not None
    values = dict(objective.diagnostics(batch))
    if batch.entropies is not None:
        values["entropy"] = batch.entropies
    if objective.kl_in_loss is not None:
        values["kl"] = objective.kl_in_loss.in_loss(batch)
    if critic is not None and batch.values is not None:
        old, returns, mask = value_targets(batch)
        now = safe(batch.values, mask)
        clip = critic.cliprange_value
        values["value/loss"] = safe(value_loss(now, old, returns, clip), mask)
        values["value/clip_fraction"] = safe(value_clip_acts(now, old, returns, clip).float(), mask)
        values["policy/approx_kl"] = 0.5 * safe(batch.logps - batch.proximal_logps, batch.mask).square()
    for name, value in values.items():
        book.add_tokens(name, value, batch.mask, origin)
    for name, rows in _by_task(trainer, batch.extras):
        if batch.entropies is not None:
            book.add_tokens(f"tasks/{name}/entropy", batch.entropies, batch.mask & rows, origin)
    carried = Carried(dict(batch.extras))
    if batch.sampler_weights is not None and made_in_loss(trainer, carried):
        record_sampling(trainer, book, batch, batch.sampler_weights, origin)


def made_in_loss(trainer: Numbers, carried: Carried) -> bool:
    """Return whether the sampler's weights are made here and not by TRL at generation, so that TRL has not logged
    them."""
    made_here = carried.sampler_weights is None or getattr(trainer.correction, "whole_batch", False)
    return carried.behaviour_logps is not None and made_here


def _by_task(trainer: Numbers, extras: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield for each task of a mixture its name and bool ``[B, 1]``: its rows."""
    carried = Carried(dict(extras))
    for number, name in enumerate(trainer.lab_settings.tasks):
        yield name, carried.task.unsqueeze(1) == number


def record_live(trainer: UpdatePort, inputs: dict[str, Any]) -> None:
    """Log for each task the share of a micro-batch's rows that are live (some loss token has an advantage)."""
    live = live_rows_of(inputs, loss_mask(inputs))
    for name, rows in _by_task(trainer, inputs):
        trainer.recorder.book("train").add(f"tasks/{name}/live_share", (live & rows.squeeze(1)).sum(), rows.sum())


@torch.no_grad()
def record_losses(trainer: UpdatePort, batch: TokenBatch, of_tokens: Tensor, denominators: Denominators) -> None:
    """Log what each task adds to the loss of the optimizer step; as HF logs the whole loss, the mean over ranks.
    ``of_tokens``: the loss per token ``[B, T]``."""
    objective = trainer.algorithm.objective
    assert objective is not None
    if not trainer.lab_settings.tasks:
        return
    book = trainer.recorder.book()
    ranks = trainer.accelerator.num_processes
    parts = None
    if isinstance(objective, MixedObjective):
        parts = objective.by_task(of_tokens, batch, denominators)
    for number, (name, rows) in enumerate(_by_task(trainer, batch.extras)):
        own = batch.mask & rows
        added = objective.aggregate(of_tokens, own, denominators) if parts is None else parts[number]
        book.add(f"tasks/{name}/loss", added / ranks, 0.0)


def record_sampling(
    trainer: Numbers, book: MetricBook, batch: TokenBatch, weights: Tensor, origin: Origin | None
) -> None:
    """Log TRL's ``sampling/*`` metrics where TRL did not make the correction at generation."""
    mask = batch.mask
    carried = Carried(dict(batch.extras))
    how = trainer.correction
    assert how is not None
    for name, total, count in by_length(how, weights, mask, carried.length_quartile):
        book.add(name, total, count)
    gap = (batch.proximal_logps - carried.behaviour_logps).abs()
    scored = mask & ~gap.isnan()
    gap = gap.nan_to_num(nan=0.0)
    chosen = mask.any(1, keepdim=True) if weights.size(1) == 1 else mask
    difference, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    book.add_tokens(f"{difference}/mean", gap, scored, origin)
    book.add_tokens(f"{ratio}/mean", weights, mask, origin)
    book.add_worst(f"{difference}/max", "max", gap, scored, origin)
    book.add_worst(f"{ratio}/min", "min", weights, chosen, origin)
    book.add_worst(f"{ratio}/max", "max", weights, chosen, origin)


def record_skipped(trainer: Numbers, book: MetricBook, batch: TokenBatch, left_out: LeftOut) -> None:
    """Count the rows that were left out in the means of metrics whose value is known for them: the surrogate's
    diagnostics, which are 0 there.

    ``batch`` is a bin of this step and shows which diagnostics there are. If it is one token wide (a dummy, say), it
    does not show whether a diagnostic is per row or per token; a toy batch of several tokens then does.
    """
    objective = trainer.algorithm.objective
    assert objective is not None
    names = objective.diagnostics(batch)
    shapes = dict(names)
    if batch.mask.size(1) == 1:
        for one in objective.each:
            shapes |= one.diagnostics(toy_batch(one))
    of_computed = {name for one in objective.each for name in getattr(one.surrogate, "of_computed_rows", ())}
    for name in names:
        if name not in of_computed:
            book.add_zeros(name, left_out, of_rows=name in shapes and shapes[name].size(1) == 1)
    for name in ("entropy", *of_computed, *(["kl"] if objective.kl_in_loss is not None else [])):
        book.add_unseen(name, left_out)


@torch.no_grad()
def record_without_gradient(book: MetricBook, batch: TokenBatch, acts: Tensor, tokens: Tensor) -> None:
    """Log two shares over live rows: of their loss tokens, those without a gradient; of their tokens, those in rows
    without any gradient.

    Args:
        book: the metrics.
        batch: the rows.
        acts: bool ``[B, T]``, tokens that have a gradient.
        tokens: long ``[B]``, tokens of prompt and completion.
    """
    live = ((batch.advantages != 0) & batch.mask).any(dim=1)
    mask = batch.mask & live.unsqueeze(1)
    book.add(NO_GRADIENT_SHARE, (mask & ~acts).sum(), mask.sum())
    book.add(SILENT_SHARE, (tokens * (live & ~acts.any(dim=1))).sum(), (tokens * live).sum())


def record_left_out(book: MetricBook, numbers: RowNumbers, ranks: int) -> None:
    """Log the shares of ``record_without_gradient`` for silent and rejected rows, which are in no bin. Every rank knows
    them, so each adds its part."""
    rows = numbers.silent | numbers.rejected
    scored = numbers.scored[rows.to(numbers.scored.device)].sum() / ranks
    tokens = numbers.lengths[rows].sum().to(scored.device) / ranks
    book.add(NO_GRADIENT_SHARE, scored, scored)
    book.add(SILENT_SHARE, tokens, tokens)
