"""Handle a bin that does not fit the device's memory: an error or, with ``update.max_tokens: auto``, a new plan.

A backward that breaks off has put its share into some gradients and not into others, so nothing of an attempt is kept.
Gradients, metrics and the old log-probs of the batch go back to what they were before the step (``StepBefore``). Then
the step is planned anew with half the tokens of the bin that was too large. That is exact, and costs computing the
finished bins again, once per run.

With several ranks the others must follow. Under DDP a bin's backward does not communicate, and the ranks agree after
the last bin; the backward that synchronises gradients is then that of a dummy. With sharded weights (FSDP, DeepSpeed)
every forward is a collective in which the other ranks already wait. There a bin that is too large is an error, as with
a fixed number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_lab.trainer.metrics.book import MetricBook
from grpo_lab.trainer.metrics.token_weight_log import TokenWeights
from grpo_lab.trainer.ports import Collectives, UpdatePort
from grpo_lab.trainer.ranks import named_place

#: accelerate's kinds of distribution in which a rank computes its bins without any other rank.
ALONE = ("NO", "MULTI_CPU", "MULTI_GPU")


@dataclass(frozen=True)
class TooLarge:
    """A bin that did not fit the device's memory.

    Args:
        tokens: tokens that the plan counts for it.
        rows: number of rows in it.
        said: torch's error message.
    """

    tokens: int
    rows: int
    said: str

    def error(self, asked: Any, kind: str) -> torch.OutOfMemoryError:
        """Return the error that ends the run.

        Args:
            asked: the setting ``update.max_tokens``.
            kind: accelerate's kind of distribution.
        """
        if self.rows == 1:
            what = f"a row of {self.tokens} tokens alone does not fit into the device's memory"
            cure = "shorten it (`max_completion_length`, its prompt), or set `gradient_checkpointing: true`"
        else:
            limit = asked or "not set: a stock micro-batch's"
            what = f"out of memory in a bin of {self.tokens} tokens (`update.max_tokens`: {limit})"
            cure = f"set `update.max_tokens: {self.tokens // 2}`"
            if asked == "auto":
                what += f", and under {kind} the other ranks wait in its forward, so the step cannot be planned anew"
            else:
                cure += ", or `auto`, which halves it by itself"
        return torch.OutOfMemoryError(f"{what}: {cure}. torch says: {self.said}")


class SweepTooLarge(torch.OutOfMemoryError):
    """A forward without gradient did not fit. An optimizer step that it belongs to is planned anew.

    Args:
        found: the bin that was too large.
        asked: the setting ``update.max_tokens``.
        kind: accelerate's kind of distribution.
    """

    def __init__(self, found: TooLarge, asked: Any, kind: str) -> None:
        super().__init__(str(found.error(asked, kind)))
        self.found = found


def can_plan_anew(trainer: UpdatePort) -> bool:
    """Return whether a step that ran out of memory can be planned anew: with ``auto``, where no rank waits for another
    inside a bin."""
    kind = trainer.accelerator.distributed_type.value
    return trainer.lab_settings.update.max_tokens == "auto" and kind in ALONE


def agreed(trainer: Collectives, own: TooLarge | None) -> TooLarge | None:
    """Return the bin that did not fit on any rank, the same on all of them: one with a single row first (it cannot be
    made smaller), else the smallest. None if all bins fitted. A collective."""
    if trainer.accelerator.num_processes == 1:
        return own
    size = (0, 0)
    said = "another rank ran out of it"
    if own is not None:
        size = (own.tokens, own.rows)
        said = own.said
    with named_place("whether all bins fit"):
        found = trainer.accelerator.gather(torch.tensor([size], device=trainer.accelerator.device)).tolist()
    failed = [TooLarge(tokens, rows, said) for tokens, rows in found if rows]
    return min(failed, key=lambda one: (one.rows > 1, one.tokens), default=None)


class StepBefore:
    """A snapshot, taken before an optimizer step, of what its bins change."""

    def __init__(
        self, trainer: Collectives, model: nn.Module, weights: TokenWeights, window: list[dict[str, Any]]
    ) -> None:
        self._model = model
        self._weights = weights
        self._had_gradients = any(one.grad is not None for one in model.parameters())
        held = {id(batch): batch for batch in (*window, *trainer.buffered_micro_batches)}
        self._fields = [(batch, dict(batch)) for batch in held.values()]
        self._book: MetricBook = trainer.recorder.book("train")
        self._pairs = self._book.so_far()
        self._trls = trainer.recorder.trl_metrics
        self._trls_then = {name: list(values) for name, values in self._trls.items()}
        self._sums = weights.so_far()

    def come_back(self, failed: TooLarge) -> None:
        """Restore the snapshot, since the bin ``failed`` did not fit. Raises RuntimeError if there were gradients
        before the step: these cannot be told from the attempt's."""
        if self._had_gradients:
            raise RuntimeError(
                "out of memory in a bin, and the step cannot be computed again: there were gradients before it, which "
                f"something beside it made; set `update.max_tokens: {failed.tokens // 2}`. torch says: {failed.said}"
            )
        for one in self._model.parameters():
            one.grad = None
        for batch, fields in self._fields:
            batch.clear()
            batch.update(fields)
        self._book.go_back(self._pairs)
        self._trls.clear()
        self._trls.update({name: list(values) for name, values in self._trls_then.items()})
        self._weights.go_back(self._sums)
