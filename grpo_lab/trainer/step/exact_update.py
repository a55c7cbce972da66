"""The exact update: compute TRL's gradient from live rows only (nonzero advantage), in bins without padding.

HF's loop calls ``compute_loss`` once per micro-batch. Here all micro-batches of an optimizer step but the last are only
put aside (their loss is a constant 0). With the last one, all rows of the step are planned, and forward and backward
run in bins. The last bin's loss is returned, so that HF itself runs the backward that synchronises gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import position_limit
from grpo_lab.trainer.exactness.shared_prompts import SharedPrompts
from grpo_lab.trainer.exactness.update_verdict import StandingVerdict, UpdateVerdict
from grpo_lab.trainer.metrics.book import LeftOut, Origin
from grpo_lab.trainer.metrics.profile import EXCHANGE, FORWARD, LAYOUT, PLANNING, host
from grpo_lab.trainer.metrics.token_weight_log import TokenWeights
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.row_table import Bin, RowTable
from grpo_lab.trainer.step.budget import ForwardBudget
from grpo_lab.trainer.step.entropy import EntropyOfStep
from grpo_lab.trainer.step.exchange import Collected, Exchange
from grpo_lab.trainer.step.log_probs import OldPolicy, with_same_fields
from grpo_lab.trainer.step.micro_batch import (
    capture_values,
    denominators_of,
    scalar_loss,
    token_batch,
    token_denominator,
)
from grpo_lab.trainer.step.out_of_memory import StepBefore, TooLarge, agreed, can_plan_anew
from grpo_lab.trainer.step.row_numbers import RowNumbers
from grpo_lab.trainer.step.update_record import UpdateRecord, padded_tokens, record_live, record_skipped, record_tokens
from grpo_lab.trainer.trl_bridge import backward, is_multimodal, without_gradient_sync
from grpo_lab.update import Plan, plan_update


class ExactUpdate:
    """Computes the exact update, one per trainer; holds the micro-batches of the step that is being collected."""

    def __init__(self, trainer: StepPort) -> None:
        self.trainer = trainer
        self.verdict = StandingVerdict(trainer)
        self.record = UpdateRecord(trainer)
        self.weights = TokenWeights(trainer)
        self.entropy = EntropyOfStep(trainer)
        self.budget = ForwardBudget(trainer)
        self._under_way: tuple[int, int] | None = None  # tokens and rows of the bin that is being computed
        self._window: list[dict[str, Any]] = []
        self._step: UpdateVerdict | None = None  # how the optimizer step that is being collected is computed
        self._old = OldPolicy(trainer, self.log_probs_of)
        self.prompts = SharedPrompts(trainer)

    def described(self) -> dict[str, Any]:
        """Return how the steps are computed and why, for the run's record."""
        return self.record.described(self.verdict.so_far()) | self.prompts.described() | self.budget.described()

    def forget(self) -> None:
        """Drop the micro-batches of an unfinished step, and decide anew what can be computed exactly."""
        self._window = []
        self._step = None
        self.entropy.begin()
        self.verdict.forget()

    def loss(self, model: nn.Module, inputs: dict[str, Any], trls: Callable[[], Tensor]) -> Tensor:
        """Return the loss on which HF should run the next backward (a constant 0 while the step is being collected).
        ``trls``: TRL's ``compute_loss`` of this micro-batch, which calls ``_compute_loss``, a team's or ours."""
        found = self._step or self.verdict.now()
        last = bool(self.trainer.accelerator.sync_gradients)
        self._step = None if last else found
        self.weights.add_rows(inputs)
        record_live(self.trainer, inputs)
        if found.stock is not None:
            if last:
                self._old.before_update_in_trls_batches()
            loss = trls()
            self.record.as_trl(inputs, found, self.budget.number)  # reduces metrics, so it is last
            return loss
        if is_multimodal(inputs):
            raise RuntimeError("this batch carries images and `train_dataset` announced none: set `update: off`")
        self._window.append(inputs)
        if not last:
            return trl_bridge.put_aside(self.trainer.accelerator)
        window = self._window
        self._window = []
        return self._run(model, window, found)

    def _run(self, model: nn.Module, window: list[dict[str, Any]], found: UpdateVerdict) -> Tensor:
        """Compute the step's bins. With ``update.max_tokens: auto``, plan smaller ones if one runs out of memory."""
        if not can_plan_anew(self.trainer):
            loss = self._attempt(model, window, found)
            assert isinstance(loss, Tensor)  # what does not fit is an error
            return loss
        before = StepBefore(self.trainer, model, self.weights, window)
        while isinstance(loss := self._attempt(model, window, found), TooLarge):
            if loss.rows == 1:
                self._under_way = None  # the error below needs no second message
                raise loss.error(self.budget.asked, self.trainer.accelerator.distributed_type.value)
            before.come_back(loss)
            self.budget.halve(loss.tokens)
        return loss

    def _attempt(self, model: nn.Module, window: list[dict[str, Any]], found: UpdateVerdict) -> Tensor | TooLarge:
        self.entropy.begin()
        received = self._old.before_update(len(window), found)
        again = self._old.again(len(window))
        kept = Collected()
        keeps = any(place is not None for place in again)
        budget, plan, rows = self._exchanged(self.entropy.counted(with_same_fields(window)), found)
        size = float(sum(batch["prompt_ids"].size(0) for batch in window))
        denominators = denominators_of(self.trainer, window[0], size, len(window))
        if any(batch["num_items_in_batch"] is not window[0]["num_items_in_batch"] for batch in window):
            # several generation batches made the step: each row has its own count
            denominators = replace(denominators, tokens=float("nan"))
        if plan.tokens_live == 0 and self.trainer.lab_settings.objective is None:
            self._record_entropy(window, found, denominators)
        computed = self._computed(model, rows, denominators, kept if keeps else None)
        if isinstance(computed, TooLarge):
            return computed
        batch, loss = computed
        if keeps:
            self._old.write(kept, rows, again, window)
        self._record_skipped(plan, rows.numbers, batch, denominators)
        self.entropy.record(len(window), len(window))
        self.entropy.end_step()
        received += rows.bytes_received
        self.record.in_bins(plan, rows.numbers, sum(map(padded_tokens, window)), found, budget, received)
        self.verdict.after_first_step()
        return loss

    def _computed(
        self, model: nn.Module, rows: Exchange, denominators: Denominators, kept: Collected | None
    ) -> tuple[TokenBatch, Tensor] | TooLarge:
        """Compute the bins; return the last bin's batch and the loss for HF's backward, which synchronises gradients.
        That is the last bin's loss. If a step may be planned anew, all bins are done first, and that loss needs no
        memory."""
        if not can_plan_anew(self.trainer):
            done = self._backwards(model, rows, rows.bins[:-1], denominators, kept)[0]
            batch, loss = self._forward(model, rows, rows.bins[-1], denominators, kept)
            return batch, loss + done
        computed = None
        failed = None
        try:
            computed = self._backwards(model, rows, rows.bins, denominators, kept)
        except torch.OutOfMemoryError as error:
            failed = self._too_large(error)
        failed = agreed(self.trainer, failed)
        if failed is not None:
            return failed
        assert computed is not None  # nothing failed
        done, last = computed
        assert last is not None  # a plan has a bin
        if self.trainer.accelerator.num_processes == 1:
            return last, trl_bridge.put_aside(self.trainer.accelerator) + done
        return last, self._forward(model, rows, [], denominators, None)[1] + done

    def _backwards(
        self, model: nn.Module, rows: Exchange, bins: list[list[int]], denominators: Denominators,
        kept: Collected | None,
    ) -> tuple[Tensor, TokenBatch | None]:  # fmt: skip
        """Run forward and backward of some bins, without gradient sync; return the sum of losses and the last batch."""
        done = torch.zeros((), device=self.trainer.accelerator.device)
        batch: TokenBatch | None = None
        for places in bins:
            del batch  # of the bin before
            with without_gradient_sync(self.trainer.accelerator, model):
                batch, loss = self._forward(model, rows, places, denominators, kept)
                backward(self.trainer.accelerator, loss)
            done = done + loss.detach()
            del loss
        return done, batch

    def _forward(
        self, model: nn.Module, rows: Exchange, places: list[int], denominators: Denominators, kept: Collected | None
    ) -> tuple[TokenBatch, Tensor]:
        tokens = rows.tokens(places)
        self._under_way = tokens, len(places)
        self.budget.bin_begins(tokens)
        with host(FORWARD):
            batch, loss = self._bin_loss(model, self._bin(rows, places), denominators)
        if kept is not None and places:
            kept.append((places, batch.logps[: len(places)].detach()))
        return batch, loss

    def _too_large(self, error: torch.OutOfMemoryError) -> TooLarge:
        """Return the current bin as too large, with torch's message."""
        assert self._under_way is not None
        return TooLarge(*self._under_way, str(error))

    def attention(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Return a context around HF's training step with attention that takes bins of any shape, also if a backward
        computes checkpointed layers again. If ``update`` is off, TRL's own attention stays."""
        if self.trainer.lab_settings.update.is_off:
            return contextlib.nullcontext()
        return trl_bridge.of_any_shape(device)

    @contextlib.contextmanager
    def memory_in_words(self) -> Iterator[None]:
        """Return a context around HF's training step, which runs the last bin's backward; if a bin does not fit, the
        error says what to set."""
        self._under_way = None
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._under_way is None:  # generation, rewards, batches as TRL cut them
                raise
            kind = self.trainer.accelerator.distributed_type.value
            raise self._too_large(error).error(self.budget.asked, kind) from error
        finally:
            self._under_way = None

    def _exchanged(self, window: list[dict[str, Any]], found: UpdateVerdict) -> tuple[int, Plan, Exchange]:
        """Return the token budget, the plan and this rank's rows of the optimizer step of these micro-batches. If no
        budget is set, it is TRL's largest micro-batch, so that memory does not rise. Collectives."""
        with host(PLANNING):
            return self._planned(window, found)

    def _planned(self, window: list[dict[str, Any]], found: UpdateVerdict) -> tuple[int, Plan, Exchange]:
        accelerator = self.trainer.accelerator
        local = RowTable.of(window)
        sizes = torch.tensor([batch["prompt_ids"].size(0) for batch in window], device=accelerator.device)
        slots = torch.arange(len(window), device=sizes.device).repeat_interleave(sizes)
        counts = torch.stack([token_denominator(self.trainer, batch).float() for batch in window])
        counts = counts.repeat_interleave(sizes)
        largest = max(map(padded_tokens, window))
        numbers = RowNumbers.of(local, slots, counts, largest, accelerator, prompts=self.prompts.may_be_shared)
        budget = self.budget.of(numbers.footprint)
        plan = self._plan(numbers, budget, found)
        with host(EXCHANGE):
            return budget, plan, Exchange(local, numbers, plan, accelerator)

    def _plan(self, numbers: RowNumbers, budget: int, found: UpdateVerdict) -> Plan:
        all_rows = found.all_rows is not None
        ranks = self.trainer.accelerator.num_processes
        overhead = self.budget.overhead
        plain = plan_update(numbers.rows(all_rows), ranks, budget, overhead_tokens=overhead)
        packed = numbers.rows(all_rows, packed=True)
        return self.prompts.planned(plain, packed, numbers.prompts, ranks, budget, overhead)

    @torch.no_grad()
    def log_probs_of(self, window: list[dict[str, Any]], found: UpdateVerdict) -> tuple[Collected, Exchange]:
        """Return the policy's log-probs of a later optimizer step, in the bins that it will have, and its rows."""
        kept, (_, _, rows) = Collected(), self._exchanged(window, found)
        for places, part, scored, _ in self._without_gradient(rows):
            if places:
                kept.append((places, _of_completions(scored, part)[: len(places)]))
        return kept, rows

    @torch.no_grad()
    def _record_entropy(self, window: list[dict[str, Any]], found: UpdateVerdict, denominators: Denominators) -> None:
        """Record the entropy of all rows, as stock TRL does: for a drop-in's step without a live row."""
        _, _, rows = self._exchanged(with_same_fields(window), replace(found, all_rows="entropy"))
        for _, part, _, entropies in self._without_gradient(rows):
            assert entropies is not None  # the policy's head makes them
            origin = self._origin(part.micro_batch, denominators)
            values = entropies.gather(1, part.take)
            self.trainer.recorder.book("train").add_tokens("entropy", values, part.loss_mask, origin)

    def _without_gradient(self, rows: Exchange) -> Iterator[tuple[list[int], Bin, Tensor, Tensor | None]]:
        """Yield, for each bin, its rows, the bin, and log-probs and entropies of its tokens."""
        with trl_bridge.without_checkpointing(self.trainer.model, self.trainer.args):
            for places in rows.bins:
                part = self._bin(rows, places)
                yield places, part, *self.prompts.log_probs(self.trainer.model, part)

    def _bin(self, rows: Exchange, places: list[int]) -> Bin:
        with host(LAYOUT):
            return rows.bin(places, position_limit(self.trainer.accelerator.unwrap_model(self.trainer.model)))

    def _bin_loss(self, model: nn.Module, rows: Bin, denominators: Denominators) -> tuple[TokenBatch, Tensor]:
        trainer = self.trainer
        with self.verdict.watching(), capture_values(trainer, model) as heard:
            scored, entropies = self.prompts.log_probs(model, rows)
        assert entropies is not None  # the policy's head makes them
        logps = _of_completions(scored, rows)
        values = None
        if heard:
            values = _of_completions(heard[0], rows)
        batch = token_batch(trainer, logps, entropies.gather(1, rows.take), rows.loss_mask, rows.fields, values)
        record_tokens(trainer, trainer.recorder.book("train"), batch, self._origin(rows.micro_batch, denominators))
        if isinstance(denominators.tokens, float):  # rows of several generation batches: each has its own count
            assert rows.token_count is not None
            denominators = replace(denominators, tokens=rows.token_count.unsqueeze(1))
        loss = scalar_loss(trainer, batch, denominators)
        self.weights.add(loss, batch.logps, batch.mask, rows.fields)
        return batch, self.entropy.added(loss, batch, denominators)

    def _origin(self, micro_batch: Tensor | None, denominators: Denominators) -> Origin:
        assert micro_batch is not None  # the step's numbers are known
        return Origin(micro_batch, int(denominators.micro_batches), self.trainer.phase.every)

    def _record_skipped(self, plan: Plan, numbers: RowNumbers, batch: TokenBatch, denominators: Denominators) -> None:
        """Count skipped rows in means that are 0 for them; only one rank adds them."""
        skipped = torch.ones(len(numbers), dtype=torch.bool)
        skipped[[row for rank in plan.bins for rows in rank for row in rows]] = False
        skipped = skipped.to(numbers.scored.device) & (self.trainer.accelerator.process_index == 0)
        origin = self._origin(numbers.micro_batch, denominators)
        left_out = LeftOut(numbers.scored, skipped, origin, numbers.widths["completion_ids"])
        record_skipped(self.trainer, self.trainer.recorder.book("train"), batch, left_out)


def _of_completions(values: Tensor, rows: Bin) -> Tensor:
    """Return the completion tokens' values ``[n, T]`` of a bin's forward ``[n, L - 1]``, 0 beyond a completion."""
    return values.gather(1, rows.take).masked_fill(~rows.fields["completion_mask"].bool(), 0.0)
