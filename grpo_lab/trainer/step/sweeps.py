"""Forwards without gradient over the rows of an optimizer step, in its bins.

The results, log-probs and entropies, are sent back to the ranks that generated the rows. They serve the look
(``step.look``) and the old log-probs of later steps (``step.log_probs``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from grpo_lab.batch import Denominators
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import position_limit
from grpo_lab.trainer.exactness.shared_prompts import SharedPrompts
from grpo_lab.trainer.exactness.update_verdict import UpdateVerdict
from grpo_lab.trainer.metrics.book import Origin
from grpo_lab.trainer.metrics.profile import FORWARD, LAYOUT, host
from grpo_lab.trainer.ports import UpdatePort
from grpo_lab.trainer.row_table import Bin
from grpo_lab.trainer.step.exchange import Collected, Exchange, Forwarded
from grpo_lab.trainer.step.out_of_memory import SweepTooLarge, TooLarge, agreed, can_plan_anew
from grpo_lab.trainer.step.row_numbers import StepRows
from grpo_lab.update import Plan


class Sweeps:
    """Forwards the rows of a step without gradient.

    Args:
        trainer: the trainer.
        prompts: computes the log-probs of a bin, with shared prompts where that is allowed.
        exchanged: plans a step and brings its rows to their ranks.
    """

    def __init__(
        self,
        trainer: UpdatePort,
        prompts: SharedPrompts,
        exchanged: Callable[[StepRows, UpdateVerdict], tuple[Plan, Exchange]],
    ) -> None:
        self._trainer = trainer
        self._prompts = prompts
        self._exchanged = exchanged
        self._under_way: list[int] = []  # rows of the bin that is being computed

    def bin(self, rows: Exchange, places: list[int]) -> Bin:
        """Return the rows ``places`` of a step as one forward."""
        with host(LAYOUT):
            return rows.bin(places, position_limit(self._trainer.accelerator.unwrap_model(self._trainer.model)))

    @torch.no_grad()
    def forwarded(self, step: StepRows, found: UpdateVerdict, entropies: bool = False) -> Forwarded:
        """Forward the rows of a step, in the bins that the step has if no row is silent. Collectives.

        A selecting part reads all tokens, so with one the rows without an advantage are forwarded, too, in bins of
        their own.

        Args:
            step: the rows of the step.
            found: what may be left out.
            entropies: also bring entropies home.

        Raises:
            SweepTooLarge: a bin did not fit the device's memory.
        """
        objective = self._trainer.algorithm.objective
        made = self._swept(step, found, entropies)
        others = replace(step, numbers=step.numbers.others())
        reads_all = objective is not None and bool(objective.selecting)
        if reads_all and found.all_rows is None and bool(others.numbers.contributes.any()):
            made = made.joined(self._swept(others, found, entropies))
        return made

    def _swept(self, step: StepRows, found: UpdateVerdict, entropies: bool) -> Forwarded:
        """Forward the rows of one plan."""
        plan, rows = self._exchanged(step, found)
        logps = Collected()
        of_tokens = Collected()
        failed = None
        try:
            for places, part, scored, entropy in self._bins(rows):
                if places:
                    assert entropy is not None  # the policy's head makes them
                    logps.append((places, of_completions(scored, part)[: len(places)]))
                    of_tokens.append((places, of_completions(entropy, part)[: len(places)]))
        except torch.OutOfMemoryError as error:
            failed = TooLarge(rows.tokens(self._under_way), len(self._under_way), str(error))
        self._raise_if(failed)
        made = self.home(rows, logps)
        if entropies:
            made = replace(made, entropies=self.home(rows, of_tokens).logps)
        came = rows.bytes_received - step.numbers.bytes_received  # which the step counts
        return replace(made, tokens=plan.tokens_computed, bytes_received=came)

    def _raise_if(self, failed: TooLarge | None) -> None:
        """Raise SweepTooLarge if a bin did not fit, on this rank or, where the step can be planned anew, on any rank. A
        collective there."""
        if can_plan_anew(self._trainer):
            failed = agreed(self._trainer, failed)
        if failed is not None:
            kind = self._trainer.accelerator.distributed_type.value
            raise SweepTooLarge(failed, self._trainer.lab_settings.update.max_tokens, kind)

    def home(self, rows: Exchange, found: Collected) -> Forwarded:
        """Send log-probs to the ranks that generated the rows. A collective if any row moved."""
        double = any(weights.dtype == torch.float64 for weights in self._trainer.model.parameters())
        return Forwarded(*rows.home(found, torch.float64 if double else torch.float32))

    @torch.no_grad()
    def record_entropy(self, step: StepRows, found: UpdateVerdict, denominators: Denominators) -> None:
        """Record the entropy of all rows, as stock TRL does, in a drop-in's step without a live row. A collective."""
        _, rows = self._exchanged(step, replace(found, all_rows="entropy"))
        for _, part, _, entropies in self._bins(rows):
            assert entropies is not None  # the policy's head makes them
            assert part.micro_batch is not None  # the step's numbers are known
            origin = origin_of(self._trainer, denominators, part.micro_batch)
            values = entropies.gather(1, part.take)
            self._trainer.recorder.book("train").add_tokens("entropy", values, part.loss_mask, origin)

    def _bins(self, rows: Exchange) -> Iterator[tuple[list[int], Bin, Tensor, Tensor | None]]:
        """Yield, for each bin, its rows, the bin, and log-probs and entropies of its tokens."""
        with trl_bridge.without_checkpointing(self._trainer.model, self._trainer.args):
            for places in rows.bins:
                self._under_way = places
                part = self.bin(rows, places)
                with host(FORWARD):
                    scored, entropies = self._prompts.log_probs(self._trainer.model, part)
                yield places, part, scored, entropies


def origin_of(trainer: UpdatePort, denominators: Denominators, micro_batch: Tensor) -> Origin:
    """Return where TRL had the rows whose micro-batches are ``micro_batch`` (long ``[B]``), for their metrics."""
    return Origin(micro_batch, int(denominators.micro_batches), trainer.phase.every)


def of_completions(values: Tensor, rows: Bin) -> Tensor:
    """Return the values of completion tokens ``[n, T]`` from those of a bin's forward ``[n, L - 1]``; 0 beyond a
    completion."""
    return values.gather(1, rows.take).masked_fill(~rows.fields["completion_mask"].bool(), 0.0)
