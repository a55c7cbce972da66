"""The proximal policy's log-probs (before the update) that a loss reads: from a forward of the loss's shapes, or its
own.

In bfloat16 (and, in the last bits, in float32) a row's log-probs depend on the shape of the forward that it is in. Old
log-probs from another forward than the loss's make a ratio that is not 1 although the policy has not moved (5.8e-3 per
sequence in bfloat16, where GSPO clips at 3e-4). So, for a generation batch that outlives an optimizer step:

    while no update has happened since the batch was generated    the loss's own forward, detached
    a micro-batch that comes again (``num_iterations`` > 1)        that same forward, kept
    a micro-batch that is first trained on after an update         one forward without gradient *before* that update, in
                                                                   the very bins that its own step will have

Which of them holds is a fact of the micro-batch, in the buffer and so in a checkpoint: all that is left of a generation
batch gets its ``proximal_logps`` in the first step that trains on some of it. It does not follow from
``policy_version``: a row may be trained on by the policy that wrote it and still bring its own (a team's, TRL's
forward, dropout), and where TRL wants none (an epoch's short last step splits a batch) it has none after an update
either.

Where the forward is random (dropout) none of this holds: TRL's old log-probs are another draw than the loss's, and so
they are here, made at generation for every row (``log_probs.GenerationForwards.draws``).

The bins of a later step are known where an optimizer step holds whole steps of one generation batch
(``steps_per_generation`` is a multiple of ``gradient_accumulation_steps``); elsewhere a step mixes rows of two batches
or of two passes, and old log-probs are off by what the precision rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import Carried, has_hole
from grpo_lab.trainer.exactness.model_conditions import takes_positions
from grpo_lab.trainer.rows import positions_at_generation

if TYPE_CHECKING:
    from grpo_lab.trainer.exactness.verdict import UpdateVerdict
    from grpo_lab.trainer.ports import StepPort
    from grpo_lab.trainer.step.exchange import Exchange


def reads_own_forward(batch: dict[str, Any]) -> Tensor:
    """bool ``[B]``: rows of a micro-batch whose old log-probs are those of the forward that trains on them."""
    old, made = Carried(batch).proximal_logps, Carried(batch).as_generated
    if old is None:
        return torch.ones(batch["completion_ids"].size(0), dtype=torch.bool, device=batch["completion_ids"].device)
    if made is None:
        return torch.zeros(old.size(0), dtype=torch.bool, device=old.device)
    return (old == made).all(dim=1) & ~has_hole(batch)


def needs_old_logprobs(batch: dict[str, Any]) -> bool:
    """Whether no update has touched this micro-batch since it was generated; the same on every rank."""
    return Carried(batch).proximal_logps is None or Carried(batch).as_generated is not None


def with_same_fields(window: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The micro-batches of an optimizer step with the same fields in each: ``old_logps`` (0 where there are none) and
    ``unmoved``."""
    if all(Carried(batch).proximal_logps is None for batch in window):
        return window
    marked = []
    for batch in window:
        carried = Carried(dict(batch))
        carried.unmoved = reads_own_forward(batch).long()
        carried.as_generated = None
        if carried.proximal_logps is None:
            carried.proximal_logps = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
        marked.append(dict(carried.fields))
    return marked


def proximal_log_probs(logps: Tensor, fields: dict[str, Any]) -> Tensor:
    """``[B, T]`` in nats, without gradient: the batch's where an update has happened since generation, else the
    forward's own."""
    own, carried = logps.detach(), Carried(fields)
    old, marked = carried.proximal_logps, carried.unmoved
    if old is None:
        return own
    unmoved = reads_own_forward(fields) if marked is None else marked.bool()
    return torch.where(unmoved.unsqueeze(1), own, old)


class CollectedLogProbs:
    """Log-probs of some rows of an optimizer step, collected bin by bin, for the ranks that the rows come from."""

    def __init__(self) -> None:
        self.parts: list[tuple[list[int], Tensor]] = []

    def add(self, rows: list[int], logps: Tensor) -> None:
        if rows:
            self.parts.append((rows, logps.detach()))


class OldPolicy:
    """What is left of the current generation batch after the step at hand, and its old log-probs."""

    def __init__(
        self,
        trainer: StepPort,
        log_probs_of: Callable[[list[dict[str, Any]], UpdateVerdict], tuple[CollectedLogProbs, Exchange]],
    ) -> None:
        self._trainer = trainer
        self._log_probs_of = log_probs_of

    @property
    def _buffer(self) -> list[dict[str, Any]]:
        """TRL's micro-batches of the current generation batch (its annotation says None)."""
        found: Any = self._trainer._buffered_inputs
        return found or []

    def _ahead(self) -> list[int]:
        """Places in TRL's buffer of the micro-batches that later steps will take from this generation batch, in
        order."""
        if not trl_bridge.wants_old_log_probs(self._trainer)[0] or not self._buffer:
            return []
        return self._trainer.phase.ahead()

    def comes_again(self, window: int) -> bool:
        """Whether a micro-batch of this step is trained on again and has no old log-probs yet: then its forward is
        kept."""
        return any(place is not None for place in self._again(window))

    def _again(self, window: int) -> list[int | None]:
        ahead, buffer = set(self._ahead()), self._buffer
        return [p if p in ahead and needs_old_logprobs(buffer[p]) else None for p in self._trainer.phase.here(window)]

    def before_update(self, window: int, verdict: UpdateVerdict) -> int:
        """Old log-probs of the micro-batches that only later steps train on, each in the bins of its step; the bytes
        that this rank received."""
        ahead, buffer = self._ahead(), self._buffer
        known: set[int | None] = set(self._trainer.phase.here(window))
        size, received = self._trainer.phase.accumulation, 0
        for start in range(0, len(ahead), size):
            step = ahead[start : start + size]
            wanted = [p if p not in known and needs_old_logprobs(buffer[p]) else None for p in step]
            if any(p is not None for p in wanted):
                batches = [buffer[p] for p in step]
                found, rows = self._log_probs_of(batches, verdict)
                self._write(found, rows, wanted, batches)
                received += rows.bytes_received
            known.update(step)
        return received

    def keep(self, found: CollectedLogProbs, rows: Exchange, window: list[dict[str, Any]]) -> None:
        """The training forward's log-probs into the micro-batches that come again."""
        self._write(found, rows, self._again(len(window)), window)

    def _write(
        self, found: CollectedLogProbs, rows: Exchange, wanted: list[int | None], batches: list[dict[str, Any]]
    ) -> None:
        """Into the places ``wanted`` of the buffer (None: not this one), what the step of ``batches`` has collected."""
        sizes = [batch["completion_ids"].size(0) for batch in batches]
        double = any(weights.dtype == torch.float64 for weights in self._trainer.model.parameters())
        local, made = rows.home(found.parts, torch.float64 if double else torch.float32)
        for place, logps, done, batch in zip(wanted, local.split(sizes), made.split(sizes), batches, strict=True):
            if place is not None:
                _fill(self._buffer[place], logps[:, : batch["completion_ids"].size(1)], done)

    @torch.no_grad()
    def before_update_in_trls_batches(self) -> None:
        """The same where the loss stays as TRL cut it after all: TRL's forward, on what has been put off."""
        trainer = self._trainer
        for place in dict.fromkeys(self._ahead()):
            batch = self._buffer[place]
            if needs_old_logprobs(batch):
                _fill(batch, trl_log_probs(trainer, batch))


def trl_log_probs(trainer: StepPort, batch: dict[str, Any]) -> Tensor:
    """TRL's own forward on a micro-batch, as the loss that stays as TRL cut it runs it."""
    with trl_bridge.without_checkpointing(trainer), rows_in_place(trainer, trainer.model, batch):
        found: Tensor = trl_bridge.stock_forward(trainer, trainer.model, batch)[0]
    return found


def rows_in_place(trainer: StepPort, model: Any, batch: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Context for TRL's forward on a micro-batch: rows of several generations keep the positions that each had in its
    own."""
    takes = takes_positions(trainer.accelerator.unwrap_model(model))
    return trl_bridge.positions_given(trainer, model, positions_at_generation(batch) if takes else None)


def _fill(batch: dict[str, Any], logps: Tensor, made: Tensor | bool = True) -> None:
    """Old log-probs into a micro-batch. Rows that were left out (``made`` False) keep those of generation, where it has
    any."""
    carried, unmoved = Carried(batch), reads_own_forward(batch).unsqueeze(1) & made
    old = carried.proximal_logps
    carried.proximal_logps = logps.clone() if old is None else torch.where(unmoved, logps, old)
    carried.as_generated = None
