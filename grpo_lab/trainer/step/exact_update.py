"""The exact update: TRL's gradient from the live rows only, in bins without padding.

HF's loop calls ``compute_loss`` once per micro-batch. Here the first micro-batches of an optimizer step are only put
aside (their loss is a constant 0); with the last one all rows of the step are planned, forwarded and backwarded in
bins, and the last bin's loss is handed back, so that HF itself runs the backward that synchronises gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import position_limit
from grpo_lab.trainer.exactness.verdict import StandingVerdict, UpdateVerdict
from grpo_lab.trainer.metrics.book import LeftOut, Origin
from grpo_lab.trainer.rows import Bin, RowNumbers, RowTable
from grpo_lab.trainer.step.exchange import Exchange
from grpo_lab.trainer.step.micro_batch import generation_budget, token_batch, token_denominator
from grpo_lab.trainer.step.old_policy import CollectedLogProbs, OldPolicy, with_same_fields
from grpo_lab.trainer.step.update_record import UpdateRecord, record_skipped, record_tokens
from grpo_lab.trainer.step.values import hears_values, token_loss, values_of_bin
from grpo_lab.trainer.trl_bridge import backward, completion_log_probs, is_multimodal, without_gradient_sync
from grpo_lab.update import Plan, default_max_tokens, plan_update

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


class ExactUpdate:
    """One per trainer; holds the micro-batches of the optimizer step that is being collected."""

    def __init__(self, trainer: StepPort) -> None:
        self.trainer = trainer
        self.verdict = StandingVerdict(trainer)
        self.record = UpdateRecord(trainer)
        self._window: list[dict[str, Any]] = []
        self._step: UpdateVerdict | None = None  # what holds for the optimizer step that is being collected
        self._old = OldPolicy(trainer, self.log_probs_of)

    def described(self) -> dict[str, Any]:
        """How the steps are computed and why, for the run's record."""
        return self.record.described(self.verdict.so_far())

    def forget(self) -> None:
        """Drop the micro-batches of a step that was not finished, and ask anew what may be done exactly."""
        self._window, self._step = [], None
        self.verdict.forget()

    def loss(self, model: nn.Module, inputs: dict[str, Any], trls: Callable[[], Tensor]) -> Tensor:
        """The loss that HF should run the next backward on (a constant 0 while the step is being collected).

        Args:
            trls: TRL's ``compute_loss`` of this micro-batch, which asks ``_compute_loss``, a team's or ours.
        """
        found = self._step or self.verdict.now()
        last = bool(self.trainer.accelerator.sync_gradients)
        self._step = None if last else found
        if found.stock is not None:
            if last:
                self._old.before_update_in_trls_batches()
            loss = trls()
            self.record.as_trl(inputs, found, self.trainer.lab_settings.update.max_tokens)  # settles metrics: last
            return loss
        if is_multimodal(inputs):
            raise RuntimeError("this batch carries images and `train_dataset` announced none: set `update: off`")
        self._window.append(inputs)
        if not last:
            return trl_bridge.put_aside(self.trainer)
        window, self._window = self._window, []
        return self._run(model, window, found)

    def _run(self, model: nn.Module, window: list[dict[str, Any]], found: UpdateVerdict) -> Tensor:
        received = self._old.before_update(len(window), found)
        kept = CollectedLogProbs() if self._old.comes_again(len(window)) else None
        budget, plan, rows = self._exchanged(with_same_fields(window), found)
        denominators = self._denominators(window)
        if plan.tokens_live == 0 and self.trainer.lab_settings.objective is None:
            self._record_entropy(window, found, denominators)
        done = torch.zeros((), device=self.trainer.accelerator.device)
        for places in rows.bins[:-1]:
            with without_gradient_sync(self.trainer, model):
                batch, loss = self._bin_loss(model, self._bin(rows, places), denominators)
                backward(self.trainer, loss)
            if kept is not None:
                kept.add(places, batch.logps[: len(places)])
            done = done + loss.detach()
            del batch, loss
        last_batch, last = self._bin_loss(model, self._bin(rows, rows.bins[-1]), denominators)
        if kept is not None:
            kept.add(rows.bins[-1], last_batch.logps[: len(rows.bins[-1])])
            self._old.keep(kept, rows, window)
        self._record_skipped(plan, rows.numbers, last_batch, denominators)
        received += rows.bytes_received
        self.record.in_bins(plan, rows.numbers, window, found, budget, received)
        self.verdict.after_first_step()
        return last + done

    def _exchanged(self, window: list[dict[str, Any]], found: UpdateVerdict) -> tuple[int, Plan, Exchange]:
        """Token budget, plan and this rank's rows of the optimizer step of these micro-batches. Collectives."""
        accelerator = self.trainer.accelerator
        local = RowTable.of(window)
        numbers = RowNumbers.of(local, *_per_row(self.trainer, window), _stock_footprint(window), accelerator)
        budget = self.trainer.lab_settings.update.max_tokens or numbers.footprint
        plan = self._plan(numbers, budget, found)
        return budget, plan, Exchange(local, numbers, plan, accelerator)

    def _plan(self, numbers: RowNumbers, budget: int, found: UpdateVerdict) -> Plan:
        rows = numbers.rows(all_rows=found.all_rows is not None)
        return plan_update(rows, self.trainer.accelerator.num_processes, budget)

    def _denominators(self, window: list[dict[str, Any]]) -> Denominators:
        """Counted over everything that TRL would compute. TRL's token count where one generation batch made the whole
        step (one tensor, summed before dividing); NaN where several did, whose rows each have their own."""
        first = window[0]["num_items_in_batch"]
        same = all(batch["num_items_in_batch"] is first for batch in window)
        return Denominators(
            rows=float(sum(batch["prompt_ids"].size(0) for batch in window)),
            tokens=token_denominator(self.trainer, window[0], mode="train") if same else float("nan"),
            budget=generation_budget(self.trainer),
            micro_batches=len(window),
        )

    @torch.no_grad()
    def log_probs_of(self, window: list[dict[str, Any]], found: UpdateVerdict) -> tuple[CollectedLogProbs, Exchange]:
        """The policy's log-probs of an optimizer step to come, in the bins that it will have."""
        kept = CollectedLogProbs()
        _, _, rows = self._exchanged(window, found)
        for places, part, scored, _ in self._without_gradient(rows):
            logps = scored.gather(1, part.take).masked_fill(~part.fields["completion_mask"].bool(), 0.0)
            kept.add(places, logps[: len(places)])
        return kept, rows

    @torch.no_grad()
    def _record_entropy(self, window: list[dict[str, Any]], found: UpdateVerdict, denominators: Denominators) -> None:
        """Stock TRL logs ``entropy`` of a step without a live row, too, and so does a drop-in: by a forward of all
        rows."""
        _, _, rows = self._exchanged(with_same_fields(window), replace(found, all_rows="entropy"))
        for _, part, _, entropies in self._without_gradient(rows):
            assert entropies is not None  # the policy's head makes them
            origin = self._origin(part.micro_batch, denominators)
            values = entropies.gather(1, part.take)
            self.trainer.recorder.book("train").add_tokens("entropy", values, part.loss_mask, origin)

    def _without_gradient(self, rows: Exchange) -> Iterator[tuple[list[int], Bin, Tensor, Tensor | None]]:
        """Rows of each bin, the bin, log-probs and entropies of its tokens."""
        with trl_bridge.without_checkpointing(self.trainer):
            for places in rows.bins:
                part = self._bin(rows, places)
                yield places, part, *completion_log_probs(self.trainer, self.trainer.model, *part.inputs)

    def _bin(self, rows: Exchange, places: list[int]) -> Bin:
        return rows.bin(places, position_limit(self.trainer.accelerator.unwrap_model(self.trainer.model)))

    def _bin_loss(self, model: nn.Module, rows: Bin, denominators: Denominators) -> tuple[TokenBatch, Tensor]:
        with self.verdict.watching():
            batch = self._forward(model, rows)
        objective = self.trainer.algorithm.objective
        assert objective is not None
        counted = denominators
        if isinstance(counted.tokens, float):  # rows of several generation batches: each has its own count
            assert rows.token_count is not None
            counted = replace(counted, tokens=rows.token_count.unsqueeze(1))
        origin = self._origin(rows.micro_batch, denominators)
        record_tokens(self.trainer, self.trainer.recorder.book("train"), batch, origin)
        return batch, objective.aggregate(token_loss(self.trainer, batch), batch.mask, counted)

    def _forward(self, model: nn.Module, rows: Bin) -> TokenBatch:
        with hears_values(self.trainer, model) as heard:
            scored, entropies = completion_log_probs(self.trainer, model, *rows.inputs)
        assert entropies is not None  # the policy's head makes them
        logps = scored.gather(1, rows.take).masked_fill(~rows.fields["completion_mask"].bool(), 0.0)
        chosen, values = entropies.gather(1, rows.take), values_of_bin(heard, rows)
        return token_batch(self.trainer, logps, chosen, rows.loss_mask, rows.fields, values)

    def _origin(self, micro_batch: Tensor | None, denominators: Denominators) -> Origin:
        assert micro_batch is not None  # the step's numbers are known
        return Origin(micro_batch, int(denominators.micro_batches), self.trainer.phase.every)

    def _record_skipped(self, plan: Plan, numbers: RowNumbers, batch: TokenBatch, denominators: Denominators) -> None:
        """Rows left out still count in means that are 0 for them; one rank speaks for all."""
        skipped = torch.ones(len(numbers), dtype=torch.bool)
        skipped[[row for rank in plan.bins for rows in rank for row in rows]] = False
        skipped = skipped.to(numbers.scored.device) & (self.trainer.accelerator.process_index == 0)
        origin = self._origin(numbers.micro_batch, denominators)
        left_out = LeftOut(numbers.scored, skipped, origin, numbers.widths["completion_ids"])
        record_skipped(self.trainer, self.trainer.recorder.book("train"), batch, left_out)


def _stock_footprint(window: list[dict[str, Any]]) -> int:
    """Padded tokens of the largest stock micro-batch on this rank; every rank plans with the largest of all."""
    return max(
        default_max_tokens(b["prompt_ids"].size(0), b["prompt_ids"].size(1), b["completion_ids"].size(1))
        for b in window
    )


def _per_row(trainer: StepPort, window: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Which micro-batch of the step each of this rank's rows was in (long), and TRL's token denominator for it
    (float)."""
    rows = torch.tensor([batch["prompt_ids"].size(0) for batch in window], device=trainer.accelerator.device)
    counts = torch.stack([token_denominator(trainer, batch, mode="train").float() for batch in window])
    return torch.arange(len(window), device=rows.device).repeat_interleave(rows), counts.repeat_interleave(rows)
