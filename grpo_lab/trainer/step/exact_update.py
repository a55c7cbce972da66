"""The exact update: compute TRL's gradient from live rows only (nonzero advantage), in bins without padding.

HF's loop calls ``compute_loss`` once per micro-batch. Here all micro-batches of an optimizer step but the last are only
put aside (their loss is a constant 0). With the last one the whole step is computed:

    before_update    old log-probs of rows that later steps train on are stored (``step.log_probs``)
    rows             every rank learns a few numbers of all rows of the step (``step.row_numbers``)
    look             where it pays, one forward finds the rows without a gradient (``step.look``)
    plan             rows are put into bins and bins on ranks (``grpo_lab.update``)
    exchange         rows go to the ranks that compute them (``step.exchange``)
    bins             forward and backward of every bin but the last

The last bin's loss is returned, so that HF itself runs the backward that synchronises gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.shared_prompts import SharedPrompts
from grpo_lab.trainer.exactness.update_verdict import StandingVerdict, UpdateVerdict
from grpo_lab.trainer.metrics.book import LeftOut
from grpo_lab.trainer.metrics.profile import EXCHANGE, FORWARD, PLANNING, host
from grpo_lab.trainer.metrics.token_weight_log import TokenWeights
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.row_table import Bin, Carried, RowTable, reach
from grpo_lab.trainer.step.budget import ForwardBudget
from grpo_lab.trainer.step.entropy_bonus import EntropyOfStep
from grpo_lab.trainer.step.exchange import Collected, Exchange, Forwarded
from grpo_lab.trainer.step.log_probs import OldPolicy, with_same_fields
from grpo_lab.trainer.step.look import Looked, look, with_value
from grpo_lab.trainer.step.micro_batch import (
    capture_values,
    denominators_of_step,
    of_rows,
    record_rejected,
    scalar_loss,
    token_batch,
    token_denominator,
)
from grpo_lab.trainer.step.out_of_memory import StepBefore, SweepTooLarge, TooLarge, agreed, can_plan_anew
from grpo_lab.trainer.step.row_numbers import RowNumbers, StepRows
from grpo_lab.trainer.step.sampler_weights import rejected_rows
from grpo_lab.trainer.step.silent import SilentRows, with_gradient
from grpo_lab.trainer.step.sweeps import Sweeps, of_completions, origin_of
from grpo_lab.trainer.step.update_record import (
    SILENT_SHARE,
    UpdateRecord,
    padded_tokens,
    record_left_out,
    record_live,
    record_skipped,
    record_tokens,
    record_without_gradient,
)
from grpo_lab.trainer.trl_bridge import backward, is_multimodal, without_gradient_sync
from grpo_lab.update import Plan, plan_update


@dataclass(frozen=True)
class BinLoss:
    """A computed bin.

    Attributes:
        batch: its rows.
        loss: its scalar loss.
        acts: bool ``[B, T]``: the tokens for which the loss has a gradient.
    """

    batch: TokenBatch
    loss: Tensor
    acts: Tensor


class ExactUpdate:
    """Computes the exact update. A trainer has one; it holds the micro-batches of the step that is being collected."""

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
        self.sweeps = Sweeps(trainer, self.prompts, self._exchanged)
        self.silent = SilentRows(trainer)

    def described(self) -> dict[str, Any]:
        """Return how the steps are computed and why, for the run's record."""
        return self.record.described(self.verdict.so_far()) | self.prompts.described() | self.budget.described()

    def forget(self) -> None:
        """Drop the micro-batches of an unfinished step, and decide anew what can be computed exactly."""
        self._window = []
        self._step = None
        self.entropy.begin()
        self.verdict.forget()
        self.silent.forget()

    def loss(self, model: nn.Module, inputs: dict[str, Any], trls: Callable[[], Tensor]) -> Tensor:
        """Return the loss on which HF should run the next backward: a constant 0 while the step is being collected.
        Where micro-batches stay as TRL cut them, it is what ``trls`` returns.

        Args:
            model: the model as HF's loop passes it.
            inputs: the micro-batch as TRL cut it.
            trls: TRL's ``compute_loss`` of this micro-batch, which calls ``_compute_loss``, a team's or ours.

        Raises:
            ValueError: log-probs among kept tokens (``top_k``) meet micro-batches as TRL cut them.
            RuntimeError: the batch has images that the data set did not announce.
        """
        found = self._step or self.verdict.now()
        last = bool(self.trainer.accelerator.sync_gradients)
        self._step = None if last else found
        self.weights.add_rows(inputs)
        record_live(self.trainer, inputs)
        if found.stock is not None:
            if Carried(inputs).kept_tokens is not None:
                raise ValueError(
                    f"`top_k`: log-probs among the tokens that the engine kept need the exact update; {found.stock}"
                )
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
        """Compute the step's bins. With ``update.max_tokens: auto``, plan smaller ones if one does not fit the device's
        memory."""
        if not can_plan_anew(self.trainer):
            loss = self._attempt(model, window, found)
            assert isinstance(loss, Tensor)  # what does not fit is an error
            return loss
        before = StepBefore(self.trainer, model, self.weights, window)
        while isinstance(loss := self._tried(model, window, found), TooLarge):
            if loss.rows == 1:
                self._under_way = None  # the error below needs no second message
                raise loss.error(self.budget.asked, self.trainer.accelerator.distributed_type.value)
            before.come_back(loss)
            self.budget.halve(loss.tokens)
        return loss

    def _tried(self, model: nn.Module, window: list[dict[str, Any]], found: UpdateVerdict) -> Tensor | TooLarge:
        """Return the loss of an attempt, or the bin that was too large. A forward of the look, or of old log-probs, may
        be that bin, too."""
        try:
            return self._attempt(model, window, found)
        except SweepTooLarge as error:
            return error.found

    def _attempt(self, model: nn.Module, window: list[dict[str, Any]], found: UpdateVerdict) -> Tensor | TooLarge:
        """Compute the step of the micro-batches ``window`` and record it. Return the loss for HF's backward, or the bin
        that was too large."""
        self.entropy.begin()
        received = self._old.before_update(len(window), found)
        again = self._old.again(len(window))
        keeps = any(place is not None for place in again)  # this step's log-probs, for a later step
        step = self._rows_of(self.entropy.counted(with_same_fields(window)), found)
        denominators = denominators_of_step(self.trainer, window, float(sum(step.sizes)))
        looked = self._looked(step, found, denominators)
        if looked is not None:
            step = looked.step
            received += looked.forwarded.bytes_received
            if keeps:
                self._old.write(looked.forwarded, again, window)
        plan, rows = self._exchanged(step, found)
        if not step.numbers.contributes.any() and self.trainer.lab_settings.objective is None:
            self.sweeps.record_entropy(step, found, denominators)
        kept = Collected() if keeps and looked is None else None
        computed = self._computed(model, rows, denominators, kept)
        if isinstance(computed, TooLarge):
            return computed
        batch, loss = computed
        if kept is not None:
            self._old.write(self.sweeps.home(rows, kept), again, window)
        self._record_skipped(plan, step, batch, denominators)
        if looked is not None:
            self.record.looked_at(looked.forwarded.tokens)
        self.entropy.record(len(window), len(window))
        self.entropy.end_step()
        received += rows.bytes_received
        padded = sum(map(padded_tokens, window))
        sums = self.record.in_bins(plan, step.numbers, padded, found, step.budget, received)
        self.silent.record_share(sums[SILENT_SHARE], step.numbers)
        self.verdict.after_first_step()
        if looked is not None:
            loss = loss + looked.loss
        return loss

    def _looked(self, step: StepRows, found: UpdateVerdict, denominators: Denominators) -> Looked | None:
        """Look at the step's rows (``step.look``) if that pays, or if a part of the loss needs it; else return None."""
        if not self.silent.looks(found):
            return None
        forwarded = self.sweeps.forwarded(step, found, entropies=True)
        origin = functools.partial(origin_of, self.trainer, denominators)
        leaves_out = self.silent.may_be_left_out(found)
        return look(self.trainer, step, forwarded, denominators, origin, leaves_out)

    def _computed(
        self, model: nn.Module, rows: Exchange, denominators: Denominators, kept: Collected | None
    ) -> tuple[TokenBatch, Tensor] | TooLarge:
        """Compute the bins; return the last bin's batch and the loss for HF's backward, or the bin that was too large.

        That loss is the last bin's, and its backward synchronises gradients. If a step may be planned anew, all bins
        are computed first, and HF gets a loss whose backward needs no memory.
        """
        if not can_plan_anew(self.trainer):
            done = self._backwards(model, rows, rows.bins[:-1], denominators, kept)[0]
            one = self._forward(model, rows, rows.bins[-1], denominators, kept)
            return one.batch, one.loss + done
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
        return last, self._forward(model, rows, [], denominators, None).loss + done

    def _backwards(
        self, model: nn.Module, rows: Exchange, bins: list[list[int]], denominators: Denominators,
        kept: Collected | None,
    ) -> tuple[Tensor, TokenBatch | None]:  # fmt: skip
        """Run forward and backward of the bins ``bins``, without gradient sync. Return the sum of their losses, and the
        last batch (None without bins). A bin without any gradient needs no backward."""
        done = torch.zeros((), device=self.trainer.accelerator.device)
        one: BinLoss | None = None
        for places in bins:
            del one  # the bin before
            last = places is rows.bins[-1]  # its backward runs, so that every parameter has a gradient, if only 0
            asks = not last and self.silent.may_ask(len(places))
            with without_gradient_sync(self.trainer.accelerator, model):
                one = self._forward(model, rows, places, denominators, kept)
                if not asks or bool(one.acts.any()):
                    backward(self.trainer.accelerator, one.loss)
            done = done + one.loss.detach()
            one = replace(one, loss=one.loss.detach())
        return done, None if one is None else one.batch

    def _forward(
        self, model: nn.Module, rows: Exchange, places: list[int], denominators: Denominators, kept: Collected | None
    ) -> BinLoss:
        """Run the forward of one bin, the rows ``places``. Its log-probs are added to ``kept``, if that is not None."""
        tokens = rows.tokens(places)
        self._under_way = tokens, len(places)
        self.budget.bin_begins(tokens)
        with host(FORWARD):
            one = self._bin_loss(model, self.sweeps.bin(rows, places), denominators)
        if kept is not None and places:
            kept.append((places, one.batch.logps[: len(places)].detach()))
        return one

    def _too_large(self, error: torch.OutOfMemoryError) -> TooLarge:
        """Return the bin that is being computed as too large, with torch's message."""
        assert self._under_way is not None
        return TooLarge(*self._under_way, str(error))

    def attention(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Return a context around HF's training step whose attention takes bins of any shape, also where a backward
        computes checkpointed layers again. With ``update: off`` TRL's own attention stays."""
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

    def _rows_of(self, window: list[dict[str, Any]], found: UpdateVerdict) -> StepRows:
        """Return the rows of the optimizer step of these micro-batches. A collective.

        Without a budget (``update.max_tokens``) a forward may have as many tokens as TRL's largest micro-batch, so that
        memory does not rise.
        """
        with host(PLANNING):
            accelerator = self.trainer.accelerator
            table = RowTable.of(window)
            sizes = [batch["prompt_ids"].size(0) for batch in window]
            of_batch = torch.tensor(sizes, device=accelerator.device)
            slots = torch.arange(len(window), device=of_batch.device).repeat_interleave(of_batch)
            counts = torch.stack([token_denominator(self.trainer, batch).float() for batch in window])[slots]
            largest = max(map(padded_tokens, window))
            rejected = None
            # a drop-in logs clip shares of all rows, as TRL does
            logs_all = self.trainer.lab_settings.objective is None
            if found.rejects and self.silent.may_be_left_out(found) and not logs_all:
                rejected = rejected_rows(self.trainer, table.loss_mask, table.fields)
            numbers = RowNumbers.of(table, slots, counts, largest, accelerator, self.prompts.may_be_shared, rejected)
            return StepRows(table, sizes, slots, counts, rejected, numbers, self.budget.of(numbers.footprint))

    def _exchanged(self, step: StepRows, found: UpdateVerdict) -> tuple[Plan, Exchange]:
        """Return the plan of the step, and the rows that it assigns to this rank. Collectives."""
        with host(PLANNING):
            plan = self._plan(step.numbers, step.budget, found)
            with host(EXCHANGE):
                return plan, Exchange(step.table, step.numbers, plan, self.trainer.accelerator)

    def _plan(self, numbers: RowNumbers, budget: int, found: UpdateVerdict) -> Plan:
        """Return the plan of the step's rows, with shared prompts if that is allowed and pays."""
        all_rows = found.all_rows is not None
        ranks = self.trainer.accelerator.num_processes
        overhead = self.budget.overhead
        plain = plan_update(numbers.rows(all_rows), ranks, budget, overhead_tokens=overhead)
        packed = numbers.rows(all_rows, packed=True)
        return self.prompts.planned(plain, packed, numbers.prompts, ranks, budget, overhead)

    def log_probs_of(self, window: list[dict[str, Any]], found: UpdateVerdict) -> Forwarded:
        """Return the policy's log-probs of a later optimizer step (its micro-batches ``window``), in the bins that it
        will have."""
        step = self._rows_of(window, found)
        made = self.sweeps.forwarded(step, found)
        return replace(made, bytes_received=made.bytes_received + step.numbers.bytes_received)

    def _bin_loss(self, model: nn.Module, rows: Bin, denominators: Denominators) -> BinLoss:
        """Compute a bin's loss, with the entropy bonus, and record its metrics."""
        trainer = self.trainer
        with self.verdict.watching(), capture_values(trainer, model) as heard:
            scored, entropies = self.prompts.log_probs(model, rows)
        assert entropies is not None  # the policy's head makes them
        logps = of_completions(scored, rows)
        entropies = entropies.gather(1, rows.take)
        looked = Carried(rows.fields)
        if looked.looked_logps is not None:
            logps = with_value(looked.looked_logps, logps)
            entropies = with_value(looked.looked_entropies, entropies)
        values = None
        if heard:
            values = of_completions(heard[0], rows)
        batch = token_batch(trainer, logps, entropies, rows.loss_mask, rows.fields, values)
        book = trainer.recorder.book("train")
        assert rows.micro_batch is not None  # the step's numbers are known
        record_tokens(trainer, book, batch, origin_of(trainer, denominators, rows.micro_batch))
        assert rows.token_count is not None
        denominators = of_rows(denominators, rows.token_count)
        loss = scalar_loss(trainer, batch, denominators)
        self.weights.add(loss, batch.logps, batch.mask, rows.fields)
        loss = self.entropy.added(loss, batch, denominators)
        acts = with_gradient(loss, batch)
        record_without_gradient(book, batch, acts, rows.take[:, 0] + 1 + reach(rows.fields["completion_mask"]))
        return BinLoss(batch, loss, acts)

    def _record_skipped(self, plan: Plan, step: StepRows, batch: TokenBatch, denominators: Denominators) -> None:
        """Count the rows that are in no bin in those means whose value is known for them. The rows without an
        advantage, whose value is 0, are added by one rank for all; rejected rows by the rank that generated them."""
        numbers = step.numbers
        book = self.trainer.recorder.book("train")
        skipped = ~(numbers.silent | numbers.rejected)
        skipped[[row for rank in plan.bins for rows in rank for row in rows]] = False
        skipped = skipped.to(numbers.scored.device) & (self.trainer.accelerator.process_index == 0)
        origin = origin_of(self.trainer, denominators, numbers.micro_batch)
        left_out = LeftOut(numbers.scored, skipped, origin, numbers.widths["completion_ids"])
        record_skipped(self.trainer, book, batch, left_out)
        record_left_out(book, numbers, self.trainer.accelerator.num_processes)
        if step.rejected is not None:
            record_rejected(self.trainer, book, step, origin_of(self.trainer, denominators, step.slots))
