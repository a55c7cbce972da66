"""What an optimizer step says for the log: what it computed against stock TRL, and its bins' entropy, KL and
diagnostics."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import Objective
from grpo_lab.trainer.carried import Carried, loss_mask, row_lengths
from grpo_lab.trainer.exactness.loss_proof import toy_batch
from grpo_lab.trainer.metrics.book import LeftOut, MetricBook, Origin, by_length
from grpo_lab.trainer.step.values import value_metrics
from grpo_lab.update import Plan, Rows, live_rows, plan_update

if TYPE_CHECKING:
    from grpo_lab.trainer.exactness.verdict import UpdateVerdict
    from grpo_lab.trainer.ports import StepPort
    from grpo_lab.trainer.rows import RowNumbers


@dataclass(frozen=True)
class _Lengths:
    """Rows of micro-batches as TRL cut them: long ``[rows, 3]`` (prompt and completion tokens, 1 where the row is
    live), padded tokens."""

    table: torch.Tensor
    padded: int
    largest: int

    @staticmethod
    def of(inputs: dict[str, Any]) -> _Lengths:
        mask, advantages = inputs["completion_mask"], inputs.get("advantages")
        scored = loss_mask(inputs)
        live = scored.any(dim=1) if advantages is None else live_rows(advantages, scored)
        padded = mask.size(0) * (inputs["prompt_mask"].size(1) + mask.size(1))
        return _Lengths(torch.stack([*row_lengths(inputs), live.long()], dim=1), padded, padded)

    @staticmethod
    def joined(parts: list[_Lengths], accelerator: Any) -> _Lengths:
        """Of all micro-batches of a step and all ranks. A collective."""
        table = torch.cat([part.table for part in parts])
        sizes = torch.tensor([[sum(p.padded for p in parts), max(p.largest for p in parts)]], device=table.device)
        if accelerator.num_processes > 1:
            table, sizes = accelerator.gather(table.contiguous()), accelerator.gather(sizes)
        return _Lengths(table, int(sizes[:, 0].sum()), int(sizes[:, 1].max()))


class UpdateRecord:
    """Metrics ``update/*`` of every optimizer step, however it is computed, and what a reader must know of it."""

    def __init__(self, trainer: StepPort) -> None:
        self.trainer = trainer
        self._parts: list[_Lengths] = []
        self._described: dict[str, Any] = {}

    def described(self, found: UpdateVerdict) -> dict[str, Any]:
        """For ``run.json``: ``rows`` (``live only``, ``all``), ``batches`` (``bins``, ``as TRL``), the reason,
        ``randomness`` where the update is exact in distribution only, and the price in the first step."""
        return self._described or _described(found)

    def in_bins(
        self,
        plan: Plan,
        numbers: RowNumbers,
        window: list[dict[str, Any]],
        found: UpdateVerdict,
        budget: int,
        received: int,
    ) -> None:
        """A step that was computed in bins; ``window`` holds this rank's micro-batches, all of one size on every rank,
        ``received`` the bytes that came to this rank for it."""
        world = self.trainer.accelerator.num_processes
        stock = world * sum(
            (b["prompt_ids"].size(1) + b["completion_ids"].size(1)) * b["prompt_ids"].size(0) for b in window
        )
        rows = sum(len(rows) for rank in plan.bins for rows in rank)
        if world > 1:
            moved = torch.tensor([float(received)], device=self.trainer.accelerator.device)
            self.trainer.recorder.book("train").add("update/bytes_moved", moved, 1.0)
        self._record(rows, len(numbers), plan.tokens_live, plan.tokens_computed, stock)
        if found.draws:
            self.trainer.recorder.say(
                "exact update: dropout is active, and its masks are drawn for the rows that are computed: stock's "
                "update in distribution, "
                "not number by number (`update.randomness: same_draws` takes stock's draws, in its batches)",
                key="exact update: same distribution",
            )
        if found.all_rows is None:
            self._described = {**_described(found), **_price(plan.tokens_computed, plan.tokens_computed, stock)}
        elif not self.trainer.recorder.has_said(_key(found.all_rows)):
            live = numbers.contributes.long()
            lengths = torch.stack([numbers.prompt_lengths, numbers.completion_lengths, live], dim=1)
            self._say(found, found.all_rows, plan.tokens_computed, self._needed(lengths, budget), stock)

    def as_trl(self, inputs: dict[str, Any], found: UpdateVerdict, budget: int | None) -> None:
        """A micro-batch that stays as TRL cut it; recorded with the last one of an optimizer step. A collective
        then."""
        self._parts.append(_Lengths.of(inputs))
        if not self.trainer.accelerator.sync_gradients:
            return
        step, self._parts = _Lengths.joined(self._parts, self.trainer.accelerator), []
        rows, tokens = step.table.size(0), int(step.table[:, :2].sum())
        self._record(rows, rows, tokens, step.padded, step.padded)
        if found.stock is not None and not self.trainer.recorder.has_said(_key(found.stock)):
            needed = self._needed(step.table, budget or step.largest)
            self._say(found, found.stock, step.padded, needed, step.padded)

    def _needed(self, lengths: torch.Tensor, budget: int) -> int:
        """Padded tokens of the step with live rows only, in bins."""
        prompts, completions, live = lengths.t().tolist()
        rows = Rows(prompts, completions, [bool(flag) for flag in live])
        return plan_update(rows, self.trainer.accelerator.num_processes, budget).tokens_computed

    def _say(self, found: UpdateVerdict, reason: str, computed: int, needed: int, stock: int) -> None:
        """Once a reason: what is not skipped, why, and what it costs."""
        self._described = {**_described(found), **_price(computed, needed, stock)}
        what = "micro-batches stay as TRL cut them" if found.stock is not None else "all rows are computed"
        times = f": {computed / needed:.1f} times as many" if needed else ", since no row carries an advantage"
        self.trainer.recorder.say(
            f"exact update: {what}: {reason}. This step computed {computed} tokens where live rows in bins have "
            f"{needed}{times}",
            key=_key(reason),
            level=logging.INFO if found.chosen else logging.WARNING,
        )

    def _record(self, rows: int, all_rows: int, tokens: int, computed: int, stock: int) -> None:
        """The same on every rank; pairs are added up over ranks, so each brings its share."""
        book, accelerator = self.trainer.recorder.book("train"), self.trainer.accelerator
        mine = 1.0 / accelerator.num_processes

        def add(name: str, total: float, count: float) -> None:
            book.add(name, torch.tensor([total * mine], device=accelerator.device), count * mine)

        add("update/live_share", rows, all_rows)
        add("update/padding_share", computed - tokens, max(computed, 1))
        add("update/tokens_computed", computed, 1)
        add("update/tokens_stock", stock, 1)
        add("update/computed_share", computed, stock)
        book.reduce(accelerator)


def _key(reason: str) -> str:
    return f"exact update: {reason}"


def _described(found: UpdateVerdict) -> dict[str, Any]:
    told = {
        "batches": "bins" if found.stock is None else "as TRL",
        "rows": "live only" if found.stock is None and found.all_rows is None else "all",
        "because": found.stock or found.all_rows,
    }
    return {**told, "randomness": "same_distribution"} if found.draws and found.stock is None else told


def _price(computed: int, needed: int, stock: int) -> dict[str, int]:
    return {"first_step_tokens": computed, "first_step_tokens_live_in_bins": needed, "first_step_tokens_stock": stock}


@torch.no_grad()
def record_tokens(trainer: StepPort, book: MetricBook, batch: TokenBatch, origin: Origin | None = None) -> None:
    """Entropy, KL and the surrogate's diagnostics into the book.

    Args:
        origin: of the rows of a bin; ``None``: the batch is a micro-batch as TRL cut it.
    """
    objective = trainer.algorithm.objective
    assert objective is not None
    values = dict(objective.diagnostics(batch))
    if batch.entropies is not None:
        values["entropy"] = batch.entropies
    if objective.kl_in_loss is not None:
        values["kl"] = objective.kl_in_loss.in_loss(batch)
    values.update(value_metrics(trainer, batch))
    for name, value in values.items():
        book.add_tokens(name, value, batch.mask, origin)
    carried = Carried(batch.extras)
    if batch.sampler_weights is not None and carried.behaviour_logps is not None and carried.sampler_weights is None:
        _record_sampler(trainer, book, batch, carried.behaviour_logps, origin)


def _record_sampler(
    trainer: StepPort, book: MetricBook, batch: TokenBatch, sampler_logps: Tensor, origin: Origin | None
) -> None:
    """TRL's ``sampling/*`` metrics, where the correction was made in the loss rather than at generation (there TRL logs
    it)."""
    weights, mask, how = batch.sampler_weights, batch.mask, trainer.correction
    quartiles = Carried(batch.extras).length_quartile
    assert weights is not None
    assert quartiles is not None
    assert how is not None
    for name, total, count in by_length(how, weights, mask, quartiles):
        book.add(name, total, count)
    gap = (batch.old_logps - sampler_logps).abs()
    scored = mask & ~gap.isnan()
    gap = gap.nan_to_num(nan=0.0)
    book.add_tokens("sampling/sampling_logp_difference/mean", gap, scored, origin)
    book.add_tokens("sampling/importance_sampling_ratio/mean", weights, mask, origin)
    chosen = mask.any(1, keepdim=True) if weights.size(1) == 1 else mask
    book.add_worst("sampling/sampling_logp_difference/max", "max", gap, scored, origin)
    book.add_worst("sampling/importance_sampling_ratio/min", "min", weights, chosen, origin)
    book.add_worst("sampling/importance_sampling_ratio/max", "max", weights, chosen, origin)


def record_skipped(trainer: StepPort, book: MetricBook, batch: TokenBatch, left_out: LeftOut) -> None:
    """Count rows that were left out where their value is known: the surrogate's diagnostics are 0 there.

    ``batch`` is a bin of this step and says which diagnostics there are. Whether one is a value per row or per token
    cannot be read off a bin that is one token wide (a dummy, completions of one token): ``per_row`` asks the objective.
    """
    objective = trainer.algorithm.objective
    assert objective is not None
    rows = per_row(objective)
    for name, value in objective.diagnostics(batch).items():
        of_rows = rows.get(name, False) if batch.mask.size(1) == 1 else value.size(1) == 1
        book.add_zeros(name, left_out, of_rows)
    for name in ("entropy", *(["kl"] if objective.kl_in_loss is not None else [])):
        book.add_unseen(name, left_out)


def per_row(objective: Objective) -> dict[str, bool]:
    """For each diagnostic of the objective: is it one value a row (as with a sequence ratio), and not one a token?

    Asked on a toy batch of several tokens, where the two look different.
    """
    return {name: value.size(1) == 1 for name, value in objective.diagnostics(toy_batch(objective)).items()}
