"""The exact update: TRL's gradient from the live rows only, in bins without padding.

HF's loop calls ``compute_loss`` once per micro-batch. Here the first micro-batches of an optimizer step are only put
aside (their loss is a constant 0); with the last one all rows of the step are planned, forwarded and backwarded in bins,
and the last bin's loss is handed back, so that HF itself runs the backward that synchronises gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.trainer.loss_proof import is_sum_over_rows, vanishes_without_advantage
from grpo_lab.trainer.metrics import LeftOut, unrecorded
from grpo_lab.trainer.micro_batch import generation_budget, token_batch, token_denominator
from grpo_lab.trainer.model_conditions import (
    RandomnessWatch,
    dropout_rate,
    keeps_positions,
    layer_drop_rate,
    mixes_rows,
    router_noise,
)
from grpo_lab.trainer.row_table import Bin, RowTable
from grpo_lab.trainer.token_metrics import record_skipped, record_tokens
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
    from grpo_lab.trainer.lab_trainer import LabTrainer


@dataclass(frozen=True)
class Verdict:
    """What may be done exactly: ``stock`` is why batches stay as TRL cut them, ``all_rows`` why no row is left out."""

    stock: str | None
    all_rows: str | None


def verdict(trainer: LabTrainer) -> Verdict:
    """Check FIELD §4's conditions on what the run really uses."""
    if trainer.lab_settings.update.is_off:
        return Verdict("update is 'off'", "update is 'off'")
    objective = trainer.algorithm.objective
    if objective is None:
        reason = f"the loss is left to TRL ({trainer.algorithm.left_to_trl})"
        return Verdict(reason, reason)
    if not is_sum_over_rows(objective) and not _is_local(objective):
        reason = "the aggregation is not a sum over rows, so its value depends on how rows share micro-batches"
        return Verdict(reason, reason)
    conditions = _conditions(trainer)
    stock, all_rows = why_stock_batches(conditions), why_all_rows(conditions)
    if all_rows is None and trainer.lab_settings.update.dead_groups == "keep":
        all_rows = "update.dead_groups is 'keep'"
    return Verdict(stock, all_rows)


def _is_local(objective: Any) -> bool:
    return getattr(objective.aggregate, "__name__", "") == "local_token_mean"


def _conditions(trainer: LabTrainer) -> LiveConditions:
    objective, args, model = trainer.algorithm.objective, trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    assert objective is not None
    with unrecorded(trainer):
        vanishes = objective.kl_in_loss is not None or vanishes_without_advantage(trainer.token_loss, objective)
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
        local_denominator=_is_local(objective),
        off_policy_mask_per_row=True,
        multimodal=may_bring_images(trainer),
    )


class ExactUpdate:
    """One per trainer; holds the micro-batches of the optimizer step that is being collected."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer = trainer
        self._window: list[dict[str, Any]] = []
        self._said: set[str] = set()
        self._verdict: Verdict | None = None
        self._watch: RandomnessWatch | None = RandomnessWatch(trainer.accelerator.device)
        self.saw_randomness = False

    def forget(self) -> None:
        """Drop the micro-batches of a step that was not finished, and ask anew what may be done exactly."""
        self._window, self._verdict = [], None

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss that HF should run the next backward on (a constant 0 while the step is being collected)."""
        own_loss_now = self.trainer.has_own_token_loss and not self._window  # a team's loss may change with the step
        if self._verdict is None or own_loss_now:
            self._verdict = verdict(self.trainer)
            self._say(self._verdict)
        if self._verdict.stock is not None:
            return self.trainer._compute_loss(model, inputs)
        if is_multimodal(inputs):
            raise RuntimeError("this batch carries images and `train_dataset` announced none: set `update: off`")
        self._window.append(inputs)
        if not self.trainer.accelerator.sync_gradients:
            nothing = torch.zeros((), device=self.trainer.accelerator.device, requires_grad=True)
            return nothing.clone()  # DeepSpeed wants a loss with a grad_fn
        window, self._window = self._window, []
        return self._run(model, window)

    def _say(self, found: Verdict) -> None:
        """State once per reason what is not skipped and why."""
        if found.stock is not None and found.stock not in self._said:
            self._said.add(found.stock)
            self.trainer.say(f"exact update: micro-batches stay as TRL cut them: {found.stock}")
        elif found.all_rows is not None and found.all_rows not in self._said:
            self._said.add(found.all_rows)
            self.trainer.say(f"exact update: all rows are computed: {found.all_rows}")

    def _run(self, model: nn.Module, window: list[dict[str, Any]]) -> Tensor:
        trainer = self.trainer
        assert self._verdict is not None
        local_rows = sum(batch["prompt_ids"].size(0) for batch in window)
        budget = trainer.lab_settings.update.max_tokens or _stock_footprint(window, trainer.accelerator)
        marked = [_marked(trainer, batch, slot) for slot, batch in enumerate(window)]
        table = RowTable.of(marked).gathered(trainer.accelerator)
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
                _, loss = self._bin_loss(model, table.bin(rows), denominators)
                backward(trainer, loss)
            done = done + loss.detach()
            del loss
        last_batch, last = self._bin_loss(model, table.bin(bins[-1]), denominators)
        self._record_skipped(plan, table, last_batch, denominators)
        self._record(plan, table, window)
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
            self._say(self._verdict)

    def _tokens(self, window: list[dict[str, Any]]) -> Tensor | float:
        """TRL's token denominator where one generation batch made the whole step (one tensor, summed before dividing)."""
        first = window[0]["num_items_in_batch"]
        if all(batch["num_items_in_batch"] is first for batch in window):
            return token_denominator(self.trainer, window[0], mode="train")
        return float("nan")

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
        record_tokens(self.trainer, self.trainer.metric_book("train"), batch, *self._slots(rows, denominators))
        return batch, objective.aggregate(self.trainer.token_loss(batch), batch.mask, counted)

    def _forward(self, model: nn.Module, rows: Bin) -> TokenBatch:
        scored, entropies = completion_log_probs(self.trainer, model, rows.input_ids, rows.labels, rows.position_ids)
        assert entropies is not None  # the policy's head makes them
        logps = scored.gather(1, rows.take).masked_fill(~rows.fields["completion_mask"].bool(), 0.0)
        return token_batch(self.trainer, logps, entropies.gather(1, rows.take), rows.loss_mask, rows.fields)

    def _slots(self, rows: Bin, denominators: Denominators) -> tuple[Tensor | None, int]:
        """Rows' micro-batches, where metrics are means of micro-batch means (TRL's definition)."""
        if not self.trainer.metric_book("train").mean_of_means:
            return None, 1
        return rows.fields["micro_batch"], int(denominators.micro_batches)

    def _record_skipped(self, plan: Plan, table: RowTable, batch: TokenBatch, denominators: Denominators) -> None:
        """Rows left out still count in means that are 0 for them; one rank speaks for all."""
        as_trl = self.trainer.metric_book("train").mean_of_means
        device, scored = table.offset.device, table.loss_mask.sum(1)
        skipped = torch.ones(table.offset.numel(), dtype=torch.bool)
        skipped[[row for rank in plan.bins for rows in rank for row in rows]] = False
        skipped = skipped.to(device) & (self.trainer.accelerator.process_index == 0)
        slots = table.fields["micro_batch"] if as_trl else torch.zeros_like(table.fields["micro_batch"])
        zeros = torch.zeros(int(denominators.micro_batches) if as_trl else 1, device=device)

        def per_slot(values: Tensor) -> Tensor:
            return zeros.index_add(0, slots, values.float())

        record_skipped(
            self.trainer,
            self.trainer.metric_book("train"),
            batch,
            LeftOut(
                tokens=per_slot(scored * skipped),
                rows=per_slot(skipped if as_trl else skipped & (scored > 0)),
                rows_with_tokens=per_slot(skipped & (scored > 0)),
                without_tokens=(per_slot(scored) == 0) & as_trl,
            ),
        )

    def _record(self, plan: Plan, table: RowTable, window: list[dict[str, Any]]) -> None:
        """What the step computed against what stock would have, the same on every rank."""
        book = self.trainer.metric_book("train")
        world = self.trainer.accelerator.num_processes
        mine = 1.0 / world  # pairs are added up over ranks; these are global already
        device = table.offset.device

        def add(name: str, total: float, count: float) -> None:
            book.add(name, torch.tensor([total * mine], device=device), count * mine)

        stock = (
            sum((b["prompt_ids"].size(1) + b["completion_ids"].size(1)) * b["prompt_ids"].size(0) for b in window)
            * world
        )
        rows = sum(len(rows) for rank in plan.bins for rows in rank)
        add("update/live_share", rows, table.offset.numel())
        add("update/padding_share", plan.tokens_computed - plan.tokens_live, max(plan.tokens_computed, 1))
        add("update/tokens_computed", plan.tokens_computed, 1)
        add("update/tokens_stock", stock, 1)
        add("update/computed_share", plan.tokens_computed, stock)
        book.reduce(self.trainer.accelerator)


def _stock_footprint(window: list[dict[str, Any]], accelerator: Any) -> int:
    """Padded tokens of the largest stock micro-batch on any rank, so that every rank plans with the same budget."""
    mine = max(
        default_max_tokens(b["prompt_ids"].size(0), b["prompt_ids"].size(1), b["completion_ids"].size(1))
        for b in window
    )
    if accelerator.num_processes == 1:
        return mine
    return int(accelerator.gather(torch.tensor([mine], device=accelerator.device)).max())


def _marked(trainer: LabTrainer, batch: dict[str, Any], slot: int) -> dict[str, Any]:
    """The micro-batch with two per-row fields: TRL's token denominator, and which micro-batch of the step it was."""
    rows = batch["prompt_ids"].size(0)
    count = token_denominator(trainer, batch, mode="train").float().expand(rows).contiguous()
    return {**batch, "num_items": count, "micro_batch": torch.full((rows,), slot, device=count.device)}
