"""Compute log-probs of the old (proximal) policy and of the reference: in bins, and only if something reads them.

TRL forwards every completion at generation, padded to the longest of the batch, before it knows the rewards. Here the
reference's numbers come from bins without padding, and the old policy's forward is put off until the first optimizer
step of the batch.

Old log-probs should come from a forward of the same shape as the loss's. In bfloat16 (and, in the last bits, in
float32) a row's log-probs depend on that shape, so another forward makes a ratio that is not 1 although the policy has
not moved (5.8e-3 per sequence in bfloat16, where GSPO clips at 3e-4). So in a batch that serves several optimizer
steps, their source depends on when a micro-batch is trained on:

    before any update since the generation          the loss's own forward, detached
    once more (``num_iterations``)                  that same forward, kept
    for the first time, but after an update         one forward without gradient *before* that update, in the very bins
                                                    that its own step will have

``ProximalSource`` says which of them holds for a micro-batch.

With a random forward (dropout), TRL's old log-probs come from another draw than the loss's. They do here, too: then
they are made at generation for every row. If an optimizer step mixes rows of two batches or passes, the bins of later
steps are not known beforehand. Old log-probs are then off by rounding.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import position_limit, takes_positions
from grpo_lab.trainer.exactness.part_questions import has_team_parts
from grpo_lab.trainer.exactness.shared_prompts import SharedPrompts
from grpo_lab.trainer.exactness.update_verdict import UpdateVerdict
from grpo_lab.trainer.ports import Collectives, UpdatePort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import (
    POSITION_OFFSET,
    Bin,
    Carried,
    RowTable,
    has_hole,
    on_device,
    row_lengths,
)
from grpo_lab.trainer.settings.limits import kept_by_engine
from grpo_lab.trainer.step.exchange import Forwarded
from grpo_lab.update import Rows, default_max_tokens, plan_update

#: Fields that the forward of a generation batch, or of some of its rows, needs.
TEXT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", POSITION_OFFSET)


class ProximalSource(enum.Enum):
    """The source of a micro-batch's proximal log-probs, those of the policy before its batch's first update.

        LOSS         no field: the forward that trains on the rows gives them, detached
        GENERATION   ``proximal_logps`` beside ``as_generated``, a copy: a row that equals its copy reads the loss's own
                     forward, as with LOSS; one that a team's method has changed is read from the field
        STORED       ``proximal_logps`` alone: read from the field
        ROW_BY_ROW   ``proximal_logps`` beside ``unmoved``: rows with 1 there as with LOSS, the others as with STORED

        generation ─┬─ put off: bins will give them ────────────────────▶ LOSS ───────┐
                    ├─ by bins, or resampled: a team may read them ─────▶ GENERATION ─┤  before an update, for the rows
                    └─ by TRL's forward, or with dropout ───────────────▶ STORED ◀────┘  that a later step trains on

        the micro-batches of an optimizer step, where not all are LOSS ─ ``with_same_fields`` ─▶ ROW_BY_ROW, in its bins

    The state follows from the micro-batch's fields, which are in TRL's buffer and so in a checkpoint. Log-probs that a
    team's method writes there are read. The state does not follow from ``policy_version``: a row may be trained on by
    the policy that wrote it and still bring its own log-probs. Where TRL wants no old log-probs (an epoch's short last
    step splits a batch), the state stays LOSS after an update, too.
    """

    LOSS = enum.auto()
    GENERATION = enum.auto()
    STORED = enum.auto()
    ROW_BY_ROW = enum.auto()

    @staticmethod
    def of(batch: dict[str, Any]) -> ProximalSource:
        """Return the state that the fields of a micro-batch or bin imply. Nothing else interprets missing ones."""
        carried = Carried(batch)
        if carried.unmoved is not None:
            return ProximalSource.ROW_BY_ROW
        if carried.proximal_logps is None:
            return ProximalSource.LOSS
        if carried.as_generated is None:
            return ProximalSource.STORED
        return ProximalSource.GENERATION


@dataclass(frozen=True)
class GenerationForwards:
    """A decision for one generation batch: which of TRL's forwards at generation are run, and how.

    Args:
        corrected: the run has a sampler correction, which TRL would compute at generation.
        in_bins: forwards run in bins, which give TRL's numbers.
        put_off: the old policy's forward is not run where TRL asks for it (before the rewards are known).
        draws: forwards are random (dropout), so nothing is put off or replaced by the loss's own forward.
    """

    corrected: bool
    in_bins: bool = False
    put_off: bool = False
    draws: bool = False

    @staticmethod
    def of(trainer: UpdatePort) -> GenerationForwards:
        """Decide for the generation batch that begins. Raises ValueError if log-probs among kept tokens (``top_k``) are
        needed and cannot be put off. A collective if the verdict on the update is not known yet."""
        misaligned = trainer.phase.outlives_a_step
        corrected = trainer.correction is not None
        wanted = misaligned or corrected
        if not trainer.model.training or not (wanted or trainer.beta != 0):
            return GenerationForwards(corrected)
        found = trainer.exact_update.verdict.now()
        in_bins = found.stock is None
        # a team's part may act a step later on rows that are left out now; a team's method may read what is put off
        switches = misaligned and has_team_parts(trainer)
        between = ("_generate_and_score_completions", "_generate_and_score", "_prepare_inputs")
        stays_ours = all(trl_bridge.teams(trainer, method) is None for method in between)
        whole = getattr(trainer.correction, "whole_batch", False)  # its weights are made at generation
        put_off = in_bins and not whole and wanted and not found.draws and not switches and stays_ours
        if kept_by_engine(trainer.args) and not put_off:
            why = found.stock or "log-probs are made at generation (dropout, a team's method, `batch_normalised`)"
            raise ValueError(f"`top_k`={trainer.args.top_k}: log-probs among kept tokens need the exact update; {why}")
        return GenerationForwards(corrected, in_bins, put_off, found.draws)

    def instead_of_trls(self, trainer: UpdatePort) -> contextlib.AbstractContextManager[list[str]]:
        """Return a context in which TRL's forwards at generation run in bins. It gives a list, into which the name of
        the forward that was put off is written (with images, none is)."""
        if not self.in_bins:
            return contextlib.nullcontext([])

        def forward(model: Any, input_ids: Tensor, attention_mask: Tensor, width: int) -> Tensor:
            prompt = input_ids.size(1) - width
            prompts = {"prompt_ids": input_ids[:, :prompt], "prompt_mask": attention_mask[:, :prompt]}
            completions = {"completion_ids": input_ids[:, prompt:], "completion_mask": attention_mask[:, prompt:]}
            return log_probs_in_bins(trainer, model, prompts | completions)

        return trl_bridge.forwards_replaced(trainer, forward, without_policy=self.put_off)

    def mark(self, output: dict[str, Any]) -> None:
        """Keep a copy of old log-probs that bins made, so that a change by a team's method can be seen."""
        if self.in_bins and not self.put_off and not self.draws:
            keep_copy(output)


@torch.no_grad()
def log_probs_in_bins(trainer: UpdatePort, model: Any, fields: dict[str, Any]) -> Tensor:
    """Return log-probs ``[B, T]`` in nats of this rank's completions under ``model``; 0 for rows without a token. A
    collective."""
    prompts: SharedPrompts = trainer.exact_update.prompts
    return forwards_in_bins(trainer, model, fields, lambda part: prompts.log_probs(model, part)[0], prompts)


@named_place("log-probs")
@torch.no_grad()
def forwards_in_bins(
    trainer: UpdatePort, model: Any, fields: dict[str, Any], of: Callable[[Bin], Tensor],
    prompts: SharedPrompts | None = None,
) -> Tensor:  # fmt: skip
    """Compute a number per token in bins, and return it as ``[B, T]`` of this rank's completions; 0 for rows without a
    token. A collective: every rank runs the same number of forwards (with sharded weights each one is a collective).

    Args:
        trainer: the trainer, for budget and ranks.
        model: the model that ``of`` forwards.
        fields: those of ``TEXT``; only rows combined from several generations have a position offset.
        of: computes the numbers of a bin, ``[n, L - 1]``.
        prompts: given if ``of`` can compute shared prompts once.
    """
    table = RowTable.of([{name: fields[name] for name in TEXT if name in fields}])
    before = table.on_host.prompts
    completions = table.on_host.completions
    shape = fields["prompt_ids"].size(1), fields["completion_ids"].size(1)
    rows_at_once = min(trainer.args.per_device_train_batch_size, len(before))
    budget = trainer.exact_update.budget.of(default_max_tokens(rows_at_once, *shape))
    rows = Rows(before, completions, completions > 0)
    overhead = trainer.exact_update.budget.overhead
    plain = plan_update(rows, 1, budget, overhead_tokens=overhead)
    plan = plain
    if prompts is not None and prompts.may_be_shared:
        plan = prompts.planned(plain, rows, table.prompt_numbers, 1, budget, overhead)
    # ranks agree on what they share: comparing the first shared bin with unshared rows may be a collective
    own = torch.tensor([[len(plan.bins[0]), len(plain.bins[0]), plan.shared]], device=table.offset.device)
    of_ranks = trainer.accelerator.gather(own)
    if of_ranks[:, 2].all():
        rounds = of_ranks[:, 0].max()
    else:
        plan = plain
        rounds = of_ranks[:, 1].max()
    (bins,) = plan.bins
    found = torch.zeros(fields["completion_ids"].shape, device=table.offset.device)
    limit = position_limit(trainer.accelerator.unwrap_model(model))
    bins = bins + [[]] * (int(rounds) - len(bins))
    table.prepared()
    with trl_bridge.without_checkpointing(trainer.model, trainer.args):
        for places, index in zip(bins, on_device(bins, found.device), strict=True):
            part = table.bin(places, limit, plan.shared, index)
            made = of(part).gather(1, part.take).masked_fill(~part.loss_mask, 0.0)
            if places:
                found[:, : made.size(1)].index_copy_(0, index, made.to(found.dtype))
    return found


def trl_log_probs(trainer: UpdatePort, batch: dict[str, Any]) -> Tensor:
    """Return log-probs ``[B, T]`` of a micro-batch by TRL's own forward, as it is run where micro-batches stay as TRL
    cut them."""
    with trl_bridge.without_checkpointing(trainer.model, trainer.args), rows_in_place(trainer, trainer.model, batch):
        found: Tensor = trl_bridge.stock_forward(trainer, trainer.model, batch)[0]
    return found


def padded_log_probs(trainer: UpdatePort, batch: dict[str, Any]) -> Tensor:
    """Return log-probs ``[B, T]`` of all rows of a generation batch by TRL's own forward, some rows at a time."""
    size = trainer.args.per_device_train_batch_size
    if Carried(batch).position_offset is not None:  # rows of several generations, text only: each keeps its positions
        starts = range(0, batch["prompt_ids"].size(0), size)
        parts = [{name: batch[name][start : start + size] for name in TEXT} for start in starts]
        return torch.cat([trl_log_probs(trainer, part) for part in parts])
    logps: Tensor = trl_bridge.stock_forward(trainer, trainer.model, batch, batch_size=size)[0]
    return logps


def rows_in_place(trainer: Collectives, model: Any, batch: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which TRL's forward of a micro-batch gives each row the positions that it had at its
    generation."""
    takes = takes_positions(trainer.accelerator.unwrap_model(model))
    return trl_bridge.positions_given(trainer.accelerator, model, positions_at_generation(batch) if takes else None)


def positions_at_generation(inputs: dict[str, Any]) -> Tensor | None:
    """Return position ids ``[B, P + T]`` that give each row the positions it had in its own generation batch; padding
    gets the row's nearest position. ``None`` if the batch is as it was generated."""
    first = Carried(inputs).position_offset
    if first is None:
        return None
    prompts, completions = row_lengths(inputs)
    width = inputs["prompt_ids"].size(1)
    steps = torch.arange(width + inputs["completion_ids"].size(1), device=first.device)
    moved = (first - (width - prompts)).unsqueeze(1) + steps
    last = (first + prompts + completions - 1).clamp(min=0).unsqueeze(1)
    return torch.minimum(moved.clamp(min=0), last)


def keep_copy(batch: dict[str, Any]) -> None:
    """Copy the proximal log-probs, so that it can be seen which rows a team's method changes; the others read the
    loss's own forward."""
    if ProximalSource.of(batch) is ProximalSource.STORED:
        carried = Carried(batch)
        carried.as_generated = carried.proximal_logps.clone()


def reads_own_forward(batch: dict[str, Any]) -> Tensor:
    """Return bool ``[B]``: rows whose proximal log-probs come from the forward that trains on them."""
    source = ProximalSource.of(batch)
    carried = Carried(batch)
    if source is ProximalSource.ROW_BY_ROW:
        return carried.unmoved.bool()
    if source is ProximalSource.GENERATION:
        return (carried.proximal_logps == carried.as_generated).all(dim=1) & ~has_hole(batch)
    rows = batch["completion_ids"]
    return torch.full((rows.size(0),), source is ProximalSource.LOSS, device=rows.device)


def needs_old_logprobs(batch: dict[str, Any]) -> bool:
    """Return whether this micro-batch's proximal log-probs must be stored before an update; the same on every rank."""
    return ProximalSource.of(batch) is not ProximalSource.STORED


def with_same_fields(window: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the micro-batches of an optimizer step with the same fields, so that they can be one table.

    If they have different sources of proximal log-probs, or one that is not LOSS, each gets ``proximal_logps`` (0 if it
    had none) and ``unmoved`` (``ProximalSource.ROW_BY_ROW``).
    """
    if all(ProximalSource.of(batch) is ProximalSource.LOSS for batch in window):
        return window
    marked = [dict(batch) for batch in window]
    for batch in marked:
        carried = Carried(batch)
        unmoved = reads_own_forward(batch).long()
        if ProximalSource.of(batch) is ProximalSource.LOSS:
            carried.proximal_logps = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
        carried.as_generated = None
        carried.unmoved = unmoved
    return marked


def proximal_log_probs(logps: Tensor, fields: dict[str, Any]) -> Tensor:
    """Return the proximal log-probs ``[B, T]`` in nats, without gradient: the stored ones, or for rows that read their
    own forward ``logps``, those of the forward that trains on them."""
    own = logps.detach()
    if ProximalSource.of(fields) is ProximalSource.LOSS:
        return own
    return torch.where(reads_own_forward(fields).unsqueeze(1), own, Carried(fields).proximal_logps)


class OldPolicy:
    """Stores proximal log-probs of the micro-batches that later steps take from the current generation batch.

    Args:
        trainer: the trainer, whose buffer holds the micro-batches.
        log_probs_of: ``log_probs_of(micro_batches, verdict)`` makes the log-probs of a later optimizer step, in the
            bins that it will have.
    """

    def __init__(self, trainer: UpdatePort, log_probs_of: Callable[..., Forwarded]) -> None:
        self._trainer = trainer
        self._log_probs_of = log_probs_of

    @property
    def _buffer(self) -> list[dict[str, Any]]:
        """TRL's micro-batches of the current generation batch."""
        return self._trainer.buffered_micro_batches

    def _ahead(self) -> list[int]:
        """Return the places in TRL's buffer of the micro-batches that later steps take from this generation batch."""
        wanted = self._trainer.phase.outlives_a_step and self._buffer
        if wanted:
            return self._trainer.phase.ahead()
        return []

    def again(self, window: int) -> list[int | None]:
        """Return for each micro-batch of this step its place in the buffer if a later step trains on it again and it
        lacks old log-probs; else None. ``window``: number of micro-batches in the step."""
        ahead = set(self._ahead())
        buffer = self._buffer
        here = self._trainer.phase.here(window)
        return [place if place in ahead and needs_old_logprobs(buffer[place]) else None for place in here]

    def before_update(self, window: int, verdict: UpdateVerdict) -> int:
        """Store old log-probs of the micro-batches that only later steps train on; return the bytes received. A
        collective."""
        ahead = self._ahead()
        buffer = self._buffer
        known: set[int | None] = set(self._trainer.phase.here(window))
        size = self._trainer.phase.accumulation
        received = 0
        for start in range(0, len(ahead), size):
            step = ahead[start : start + size]
            wanted = [place if place not in known and needs_old_logprobs(buffer[place]) else None for place in step]
            if any(place is not None for place in wanted):
                batches = [buffer[place] for place in step]
                found = self._log_probs_of(batches, verdict)
                self.write(found, wanted, batches)
                received += found.bytes_received
            known.update(step)
        return received

    def write(self, found: Forwarded, wanted: list[int | None], batches: list[dict[str, Any]]) -> None:
        """Store the log-probs of a step in TRL's buffer.

        Args:
            found: the log-probs of the step's rows.
            wanted: for each micro-batch of the step its place in the buffer; None for one that needs none.
            batches: the micro-batches of the step.
        """
        sizes = [batch["completion_ids"].size(0) for batch in batches]
        of_rows = (found.logps.split(sizes), found.made.split(sizes))
        for place, logps, done, batch in zip(wanted, *of_rows, batches, strict=True):
            if place is not None:
                _fill(self._buffer[place], logps[:, : batch["completion_ids"].size(1)], done)

    @torch.no_grad()
    def before_update_in_trls_batches(self) -> None:
        """Store old log-probs by TRL's own forward, where micro-batches stay as TRL cut them."""
        for place in dict.fromkeys(self._ahead()):
            batch = self._buffer[place]
            if needs_old_logprobs(batch):
                _fill(batch, trl_log_probs(self._trainer, batch))


def _fill(batch: dict[str, Any], logps: Tensor, made: Tensor | bool = True) -> None:
    """Store old log-probs in a micro-batch. Rows that were not computed (``made`` is False) keep those of
    generation."""
    carried = Carried(batch)
    if ProximalSource.of(batch) is ProximalSource.LOSS:
        carried.proximal_logps = logps.clone()
    else:
        unmoved = reads_own_forward(batch).unsqueeze(1) & made
        carried.proximal_logps = torch.where(unmoved, logps, carried.proximal_logps)
    carried.as_generated = None
