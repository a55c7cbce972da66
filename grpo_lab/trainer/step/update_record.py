"""What the optimizer steps compute against what stock TRL would: metrics of every step, one line at the start, the run's record."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_lab.trainer.carried import loss_mask, row_lengths
from grpo_lab.update import Plan, Rows, live_rows, plan_update

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort
    from grpo_lab.trainer.step.row_numbers import RowNumbers
    from grpo_lab.trainer.step.verdict import Verdict


@dataclass(frozen=True)
class _Lengths:
    """Rows of micro-batches as TRL cut them: long ``[rows, 3]`` (prompt and completion tokens, 1 where the row is live), padded tokens."""

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

    def described(self, found: Verdict) -> dict[str, Any]:
        """For ``run.json``: ``rows`` (``live only``, ``all``), ``batches`` (``bins``, ``as TRL``), the reason, ``randomness`` where the update is exact
        in distribution only, and the price in the first step."""
        return self._described or _described(found)

    def in_bins(
        self,
        plan: Plan,
        numbers: RowNumbers,
        window: list[dict[str, Any]],
        found: Verdict,
        budget: int,
        received: int,
    ) -> None:
        """A step that was computed in bins; ``window`` holds this rank's micro-batches, all of one size on every rank, ``received`` the bytes
        that came to this rank for it."""
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
                "exact update: dropout is active, and its masks are drawn for the rows that are computed: stock's update in distribution, "
                "not number by number (`update.randomness: same_draws` takes stock's draws, in its batches)",
                key="exact update: same distribution",
            )
        if found.all_rows is None:
            self._described = {**_described(found), **_price(plan.tokens_computed, plan.tokens_computed, stock)}
        elif not self.trainer.recorder.has_said(_key(found.all_rows)):
            live = numbers.contributes.long()
            lengths = torch.stack([numbers.prompt_lengths, numbers.completion_lengths, live], dim=1)
            self._say(found, found.all_rows, plan.tokens_computed, self._needed(lengths, budget), stock)

    def as_trl(self, inputs: dict[str, Any], found: Verdict, budget: int | None) -> None:
        """A micro-batch that stays as TRL cut it; recorded with the last one of an optimizer step. A collective then."""
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

    def _say(self, found: Verdict, reason: str, computed: int, needed: int, stock: int) -> None:
        """Once a reason: what is not skipped, why, and what it costs."""
        self._described = {**_described(found), **_price(computed, needed, stock)}
        what = "micro-batches stay as TRL cut them" if found.stock is not None else "all rows are computed"
        times = f": {computed / needed:.1f} times as many" if needed else ", since no row carries an advantage"
        self.trainer.recorder.say(
            f"exact update: {what}: {reason}. This step computed {computed} tokens where live rows in bins have {needed}{times}",
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


def _described(found: Verdict) -> dict[str, Any]:
    told = {
        "batches": "bins" if found.stock is None else "as TRL",
        "rows": "live only" if found.stock is None and found.all_rows is None else "all",
        "because": found.stock or found.all_rows,
    }
    return {**told, "randomness": "same_distribution"} if found.draws and found.stock is None else told


def _price(computed: int, needed: int, stock: int) -> dict[str, int]:
    return {"first_step_tokens": computed, "first_step_tokens_live_in_bins": needed, "first_step_tokens_stock": stock}


__all__ = ["UpdateRecord"]
