"""The old policy's log-probs that a loss reads: from a forward of the same shapes as its own, or its own.

In bfloat16 (and, in the last bits, in float32) a row's log-probs depend on the shape of the forward that it is in. Old log-probs from
another forward than the loss's make a ratio that is not 1 although the policy has not moved (5.8e-3 per sequence in bfloat16,
where GSPO clips at 3e-4). So, for a generation batch that outlives an optimizer step:

    while no update has happened since the batch was generated    the loss's own forward, detached
    a micro-batch that comes again (``num_iterations`` > 1)        that same forward, kept
    a micro-batch that is first trained on after an update         one forward without gradient *before* that update, in the
                                                                   very bins that its own step will have

Whether an update has happened is not counted: a micro-batch without old log-probs is one that no update has touched, since all that is
left of a generation batch gets its own in the first step that trains on some of it. That is in the buffer, and so in a checkpoint.

Where the forward is random (dropout) none of this holds: TRL's old log-probs are another draw than the loss's, and so they are here,
made at generation for every row (``log_probs.GenerationForwards.draws``).

The bins of a later step are known where an optimizer step holds whole steps of one generation batch (``steps_per_generation`` is a multiple of
``gradient_accumulation_steps``); elsewhere a step mixes rows of two batches or of two passes, and old log-probs are off by
what the precision rounds.
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
    from grpo_lab.trainer.exactness.verdict import Verdict
    from grpo_lab.trainer.ports import StepPort
    from grpo_lab.trainer.step.exchange import Exchange


def unmoved_rows(batch: dict[str, Any]) -> Tensor:
    """bool ``[B]``: rows of a micro-batch whose old log-probs are those of the forward that trains on them."""
    old, made = Carried(batch).old_logps, Carried(batch).as_generated
    if old is None:
        return torch.ones(batch["completion_ids"].size(0), dtype=torch.bool, device=batch["completion_ids"].device)
    if made is None:
        return torch.zeros(old.size(0), dtype=torch.bool, device=old.device)
    return (old == made).all(dim=1) & ~has_hole(batch)


def awaits(batch: dict[str, Any]) -> bool:
    """Whether no update has touched this micro-batch since it was generated; the same on every rank."""
    return Carried(batch).old_logps is None or Carried(batch).as_generated is not None


def with_unmoved(window: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The micro-batches of an optimizer step with the same fields in each: ``old_logps`` (0 where there are none) and ``unmoved``."""
    if all(Carried(batch).old_logps is None for batch in window):
        return window
    marked = []
    for batch in window:
        carried = Carried(dict(batch))
        carried.unmoved = unmoved_rows(batch).long()
        carried.as_generated = None
        if carried.old_logps is None:
            carried.old_logps = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
        marked.append(dict(carried.fields))
    return marked


def old_log_probs(logps: Tensor, fields: dict[str, Any]) -> Tensor:
    """``[B, T]`` in nats, without gradient: the batch's where an update has happened since generation, else the forward's own."""
    own, carried = logps.detach(), Carried(fields)
    old, marked = carried.old_logps, carried.unmoved
    if old is None:
        return own
    unmoved = unmoved_rows(fields) if marked is None else marked.bool()
    return torch.where(unmoved.unsqueeze(1), own, old)


class Kept:
    """Log-probs of some rows of an optimizer step, collected bin by bin, for the ranks that the rows come from."""

    def __init__(self) -> None:
        self.parts: list[tuple[list[int], Tensor]] = []

    def add(self, rows: list[int], logps: Tensor) -> None:
        if rows:
            self.parts.append((rows, logps.detach()))


class OldPolicy:
    """What is left of the current generation batch after the step at hand, and its old log-probs."""

    def __init__(
        self, trainer: StepPort, log_probs_of: Callable[[list[dict[str, Any]], Verdict], tuple[Kept, Exchange]]
    ) -> None:
        self._trainer = trainer
        self._log_probs_of = log_probs_of

    @property
    def _buffer(self) -> list[dict[str, Any]]:
        """TRL's micro-batches of the current generation batch (its annotation says None)."""
        found: Any = self._trainer._buffered_inputs
        return found or []

    def _ahead(self) -> list[int]:
        """Places in TRL's buffer of the micro-batches that later steps will take from this generation batch, in order."""
        if not trl_bridge.wants_old_log_probs(self._trainer)[0] or not self._buffer:
            return []
        return self._trainer.phase.ahead()

    def _here(self, window: int) -> list[int | None]:
        """Place in the buffer of each of the step's micro-batches; None for one of an earlier generation batch."""
        return self._trainer.phase.here(window)

    def comes_again(self, window: int) -> bool:
        """Whether a micro-batch of this step is trained on again and has no old log-probs yet: then its forward is kept."""
        return any(place is not None for place in self._again(window))

    def _again(self, window: int) -> list[int | None]:
        ahead, buffer = set(self._ahead()), self._buffer
        return [p if p in ahead and awaits(buffer[p]) else None for p in self._here(window)]

    def before_update(self, window: int, verdict: Verdict) -> int:
        """Old log-probs of the micro-batches that only later steps train on, each in the bins of its step; the bytes that this rank received."""
        ahead, buffer = self._ahead(), self._buffer
        known: set[int | None] = set(self._here(window))
        size, received = self._trainer.phase.accumulation, 0
        for start in range(0, len(ahead), size):
            step = ahead[start : start + size]
            if any(p not in known and awaits(buffer[p]) for p in step):
                found, rows = self._log_probs_of([buffer[p] for p in step], verdict)
                self._hand_out(found, rows, [p if p not in known and awaits(buffer[p]) else None for p in step], step)
                received += rows.bytes_received
            known.update(step)
        return received

    def keep(self, found: Kept, rows: Exchange, window: list[dict[str, Any]]) -> None:
        """The training forward's log-probs into the micro-batches that come again."""
        here: list[Any] = self._here(len(window))
        self._hand_out(found, rows, self._again(len(window)), here, window)

    def _hand_out(
        self,
        found: Kept,
        rows: Exchange,
        wanted: list[int | None],
        places: list[Any],
        batches: list[dict[str, Any]] | None = None,
    ) -> None:
        buffer = self._buffer
        batches = batches or [buffer[p] for p in places]
        sizes = [batch["completion_ids"].size(0) for batch in batches]
        double = any(weights.dtype == torch.float64 for weights in self._trainer.model.parameters())
        local, made = rows.home(found.parts, torch.float64 if double else torch.float32)
        for place, logps, done, batch in zip(wanted, local.split(sizes), made.split(sizes), batches, strict=True):
            if place is not None:
                _fill(buffer[place], logps[:, : batch["completion_ids"].size(1)], done)

    @torch.no_grad()
    def before_update_in_trls_batches(self) -> None:
        """The same where the loss stays as TRL cut it after all: TRL's forward, on what has been put off."""
        trainer = self._trainer
        for place in dict.fromkeys(self._ahead()):
            batch = self._buffer[place]
            if awaits(batch):
                _fill(batch, trl_log_probs(trainer, batch))


def trl_log_probs(trainer: StepPort, batch: dict[str, Any]) -> Tensor:
    """TRL's own forward on a micro-batch, as the loss that stays as TRL cut it runs it."""
    with trl_bridge.without_checkpointing(trainer), rows_in_place(trainer, trainer.model, batch):
        found: Tensor = trl_bridge.stock_forward(trainer, trainer.model, batch)[0]
    return found


def rows_in_place(trainer: StepPort, model: Any, batch: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Context for TRL's forward on a micro-batch: rows of several generations keep the positions that each had in its own."""
    takes = takes_positions(trainer.accelerator.unwrap_model(model))
    return trl_bridge.positions_given(trainer, model, positions_at_generation(batch) if takes else None)


def _fill(batch: dict[str, Any], logps: Tensor, made: Tensor | bool = True) -> None:
    """Old log-probs into a micro-batch. Rows that were left out (``made`` False) keep those of generation, where it has any."""
    carried, unmoved = Carried(batch), unmoved_rows(batch).unsqueeze(1) & made
    old = carried.old_logps
    carried.old_logps = logps.clone() if old is None else torch.where(unmoved, logps, old)
    carried.as_generated = None
