"""The exact update: TRL's gradient from the live rows only, in bins without padding.

HF's loop calls ``compute_loss`` once per micro-batch. Here the first micro-batches of an optimizer step are only put
aside (their loss is a constant 0); with the last one all rows of the step are planned, forwarded and backwarded in bins,
and the last bin's loss is handed back, so that HF itself runs the backward that synchronises gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.metrics.book import LeftOut, Origin
from grpo_lab.trainer.step.bin_probe import BinProbe
from grpo_lab.trainer.step.micro_batch import generation_budget, token_batch, token_denominator
from grpo_lab.trainer.step.model_conditions import (
    RandomnessWatch,
    dropout_rate,
    keeps_positions,
    layer_drop_rate,
    mixes_rows,
    padding_reaches_state,
    position_limit,
    router_noise,
)
from grpo_lab.trainer.step.old_policy import Kept, OldPolicy, with_unmoved
from grpo_lab.trainer.step.part_questions import answers, has_team_parts, is_local
from grpo_lab.trainer.step.row_table import Bin, RowTable
from grpo_lab.trainer.step.token_metrics import record_skipped, record_tokens
from grpo_lab.trainer.step.update_record import UpdateRecord, Verdict
from grpo_lab.trainer.trl_bridge import (
    backward,
    completion_log_probs,
    is_multimodal,
    may_bring_images,
    without_gradient_sync,
)
from grpo_lab.update import (
    LiveConditions,
    Plan,
    Rows,
    default_max_tokens,
    live_rows,
    plan_update,
    why_all_rows,
    why_stock_batches,
)

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


def verdict(trainer: StepPort, ask_model: bool = True) -> Verdict:
    """Check FIELD §4's conditions on what the run really uses; ``ask_model``: where they hold, by a forward too (a collective)."""
    if trainer.lab_settings.update.is_off:
        return Verdict("update is 'off'", "update is 'off'", chosen=True)
    objective = trainer.algorithm.objective
    if objective is None:
        reason = f"the loss is left to TRL ({trainer.algorithm.left_to_trl})"
        return Verdict(reason, reason)
    asked = answers(trainer, objective)
    if asked.stock is not None:
        return Verdict(asked.stock, asked.stock)
    conditions = _conditions(trainer, asked.vanishes)
    stock, all_rows = why_stock_batches(conditions), why_all_rows(conditions)
    if stock is None and ask_model:
        stock = trainer.exact_update.probe.why_stock()
        all_rows = stock or all_rows
    if all_rows is None and trainer.lab_settings.update.dead_groups == "keep":
        return Verdict(stock, "update.dead_groups is 'keep'", chosen=True)
    return Verdict(stock, all_rows)


def _conditions(trainer: StepPort, vanishes: bool) -> LiveConditions:
    objective, args, model = trainer.algorithm.objective, trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    assert objective is not None
    return LiveConditions(
        kl_in_loss=0.0 if objective.kl_in_loss is None else objective.kl_in_loss.coefficient,
        value_loss=0.0,
        surrogate_vanishes=vanishes,
        entropy_bonus=args.entropy_coef,
        adaptive_entropy=args.use_adaptive_entropy,
        entropy_quantile=args.top_entropy_quantile,
        moe_aux_loss=trainer.router_aux_loss_coef if trainer.aux_loss_enabled else 0.0,
        dropout=dropout_rate(model),
        layer_drop=layer_drop_rate(model),
        router_noise=router_noise(model),
        random_forward=trainer.exact_update.saw_randomness,
        embedding_noise=args.neftune_noise_alpha or 0.0,
        batch_dependent_layers=mixes_rows(model, trainer.accelerator.mixed_precision),
        shift_invariant_positions=keeps_positions(model),
        state_reads_padding=padding_reaches_state(model),
        local_denominator=is_local(objective),
        off_policy_mask_per_row=True,
        multimodal=may_bring_images(trainer),
    )


class ExactUpdate:
    """One per trainer; holds the micro-batches of the optimizer step that is being collected."""

    def __init__(self, trainer: StepPort) -> None:
        self.trainer = trainer
        self._window: list[dict[str, Any]] = []
        self.record = UpdateRecord(trainer)
        self._begins = True  # the next micro-batch is the first of an optimizer step
        self._verdict: Verdict | None = None
        self._watch: RandomnessWatch | None = RandomnessWatch(trainer.accelerator.device)
        self._old = OldPolicy(trainer, self.log_probs_of)
        self.probe = BinProbe(trainer)
        self.saw_randomness = False

    def described(self) -> dict[str, Any]:
        """How the steps are computed and why, for the run's record."""
        return self.record.described(self._verdict or verdict(self.trainer, ask_model=False))

    def left_alone(self, inputs: dict[str, Any]) -> None:
        """A micro-batch whose loss a team's own ``_compute_loss`` makes."""
        reason = f"`{type(self.trainer).__name__}._compute_loss` makes the loss; `token_loss` is the hook that keeps the exact update"
        self._verdict = Verdict(reason, reason)
        self.record.as_trl(inputs, self._verdict, self.trainer.lab_settings.update.max_tokens)

    def forget(self) -> None:
        """Drop the micro-batches of a step that was not finished, and ask anew what may be done exactly."""
        self._window, self._verdict, self._begins = [], None, True

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss that HF should run the next backward on (a constant 0 while the step is being collected)."""
        first, self._begins = self._begins, bool(self.trainer.accelerator.sync_gradients)
        if self._verdict is None or (first and has_team_parts(self.trainer)):  # a team's part may change with the step
            self._verdict = verdict(self.trainer)
        if self._verdict.stock is not None:
            if self.trainer.accelerator.sync_gradients:
                self._old.before_update_in_trls_batches()
            loss: Tensor = self.trainer._compute_loss(model, inputs)
            self.record.as_trl(
                inputs, self._verdict, self.trainer.lab_settings.update.max_tokens
            )  # settles metrics: last
            return loss
        if is_multimodal(inputs):
            raise RuntimeError("this batch carries images and `train_dataset` announced none: set `update: off`")
        self._window.append(inputs)
        if not self.trainer.accelerator.sync_gradients:
            nothing = torch.zeros((), device=self.trainer.accelerator.device, requires_grad=True)
            return nothing.clone()  # DeepSpeed wants a loss with a grad_fn
        window, self._window = self._window, []
        return self._run(model, window)

    def _run(self, model: nn.Module, window: list[dict[str, Any]]) -> Tensor:
        trainer = self.trainer
        assert self._verdict is not None
        self._old.before_update(len(window))
        kept = Kept() if self._old.comes_again(len(window)) else None
        local_rows = sum(batch["prompt_ids"].size(0) for batch in window)
        marked = [_marked(trainer, batch, slot) for slot, batch in enumerate(with_unmoved(window))]
        table = RowTable.of(marked).gathered(trainer.accelerator)
        budget = self._budget(window)
        plan = self._plan(table, budget)
        denominators = Denominators(
            rows=float(local_rows),
            tokens=self._tokens(window),
            budget=generation_budget(trainer),
            micro_batches=len(window),
        )
        bins = plan.bins[trainer.accelerator.process_index]
        done = torch.zeros((), device=trainer.accelerator.device)
        for rows in bins[:-1]:
            with without_gradient_sync(trainer, model):
                batch, loss = self._bin_loss(model, self._bin(table, rows), denominators)
                backward(trainer, loss)
            if kept is not None:
                kept.add(rows, batch.logps[: len(rows)])
            done = done + loss.detach()
            del batch, loss
        last_batch, last = self._bin_loss(model, self._bin(table, bins[-1]), denominators)
        if kept is not None:
            kept.add(bins[-1], last_batch.logps[: len(bins[-1])])
            self._old.keep(kept, table, window)
        self._record_skipped(plan, table, last_batch, denominators)
        self.record.in_bins(plan, table, window, self._verdict, budget)
        self._look_for_randomness()
        return last + done

    def _look_for_randomness(self) -> None:
        """After the first step: a forward that drew random numbers, for whatever reason, keeps TRL's batches from now on."""
        if self._watch is None:
            return
        self.saw_randomness = self._watch.drawn_anywhere(self.trainer.accelerator)
        self._watch = None
        if self.saw_randomness:
            self._verdict = verdict(self.trainer)

    def _tokens(self, window: list[dict[str, Any]]) -> Tensor | float:
        """TRL's token denominator where one generation batch made the whole step (one tensor, summed before dividing)."""
        first = window[0]["num_items_in_batch"]
        if all(batch["num_items_in_batch"] is first for batch in window):
            return token_denominator(self.trainer, window[0], mode="train")
        return float("nan")

    @torch.no_grad()
    def log_probs_of(self, window: list[dict[str, Any]]) -> tuple[Kept, RowTable]:
        """The policy's log-probs of an optimizer step to come, in the bins that it will have."""
        trainer, found = self.trainer, Kept()
        table = RowTable.of(window).gathered(trainer.accelerator)
        plan = self._plan(table, self._budget(window))
        with trl_bridge.without_checkpointing(trainer):
            for rows in plan.bins[trainer.accelerator.process_index]:
                part = self._bin(table, rows)
                scored, _ = completion_log_probs(trainer, trainer.model, part.input_ids, part.labels, part.position_ids)
                logps = scored.gather(1, part.take).masked_fill(~part.fields["completion_mask"].bool(), 0.0)
                found.add(rows, logps[: len(rows)])
        return found, table

    def _bin(self, table: RowTable, rows: list[int]) -> Bin:
        return table.bin(rows, position_limit(self.trainer.accelerator.unwrap_model(self.trainer.model)))

    def _budget(self, window: list[dict[str, Any]]) -> int:
        given = self.trainer.lab_settings.update.max_tokens
        return given or _stock_footprint(window, self.trainer.accelerator)

    def _plan(self, table: RowTable, budget: int) -> Plan:
        mask = table.loss_mask
        assert self._verdict is not None
        live = mask.any(dim=1) if self._verdict.all_rows is not None else live_rows(table.advantages, mask)
        columns = torch.stack([table.prompt_lengths, table.completion_lengths, live.long()]).tolist()
        rows = Rows(columns[0], columns[1], [bool(flag) for flag in columns[2]])
        return plan_update(rows, self.trainer.accelerator.num_processes, budget)

    def _bin_loss(self, model: nn.Module, rows: Bin, denominators: Denominators) -> tuple[TokenBatch, Tensor]:
        if self._watch is not None:
            self._watch.start()
        batch = self._forward(model, rows)
        if self._watch is not None:
            self._watch.stop()
        objective = self.trainer.algorithm.objective
        assert objective is not None
        counted = denominators
        if isinstance(counted.tokens, float):  # rows of several generation batches: each has its own count
            counted = replace(counted, tokens=rows.fields["num_items"].unsqueeze(1))
        record_tokens(self.trainer, self.trainer.recorder.book("train"), batch, self._origin(rows.fields, denominators))
        return batch, objective.aggregate(self.trainer.token_loss(batch), batch.mask, counted)

    def _forward(self, model: nn.Module, rows: Bin) -> TokenBatch:
        scored, entropies = completion_log_probs(self.trainer, model, rows.input_ids, rows.labels, rows.position_ids)
        assert entropies is not None  # the policy's head makes them
        logps = scored.gather(1, rows.take).masked_fill(~rows.fields["completion_mask"].bool(), 0.0)
        return token_batch(self.trainer, logps, entropies.gather(1, rows.take), rows.loss_mask, rows.fields)

    def _origin(self, fields: dict[str, Tensor], denominators: Denominators) -> Origin:
        return Origin(fields["micro_batch"], int(denominators.micro_batches), self.trainer.phase.every)

    def _record_skipped(self, plan: Plan, table: RowTable, batch: TokenBatch, denominators: Denominators) -> None:
        """Rows left out still count in means that are 0 for them; one rank speaks for all."""
        skipped = torch.ones(table.offset.numel(), dtype=torch.bool)
        skipped[[row for rank in plan.bins for rows in rank for row in rows]] = False
        skipped = skipped.to(table.offset.device) & (self.trainer.accelerator.process_index == 0)
        mask = table.loss_mask
        left_out = LeftOut(mask.sum(1), skipped, self._origin(table.fields, denominators), mask.size(1))
        record_skipped(self.trainer, self.trainer.recorder.book("train"), batch, left_out)


def _stock_footprint(window: list[dict[str, Any]], accelerator: Any) -> int:
    """Padded tokens of the largest stock micro-batch on any rank, so that every rank plans with the same budget."""
    mine = max(
        default_max_tokens(b["prompt_ids"].size(0), b["prompt_ids"].size(1), b["completion_ids"].size(1))
        for b in window
    )
    if accelerator.num_processes == 1:
        return mine
    return int(accelerator.gather(torch.tensor([mine], device=accelerator.device)).max())


def _marked(trainer: StepPort, batch: dict[str, Any], slot: int) -> dict[str, Any]:
    """The micro-batch with two per-row fields: TRL's token denominator, and which micro-batch of the step it was."""
    rows = batch["prompt_ids"].size(0)
    count = token_denominator(trainer, batch, mode="train").float().expand(rows).contiguous()
    return {**batch, "num_items": count, "micro_batch": torch.full((rows,), slot, device=count.device)}
