"""``token_weights_every: n``: log the weight of tokens in every n-th optimizer step, by length and by pass rate. Each
such step, from the first on, is a line of ``token_weights.jsonl`` (``grpo_lab.diagnostics.token_weights``).

A token's weight is −∂L/∂log π of the token; the file holds sums of its absolute value. The loss L that HF is about to
train on is differentiated by the log-probs of its own forward. That needs no second forward and no second call of a
hook, and training stays the same to the bit. Completions that were not computed count, too, with their weight of
exactly 0. Weights are averaged over ranks as gradients are. A step that is left out (``step.guard``, or fp16's scaler)
has no line: no token had a weight in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_lab.diagnostics.token_weights import BUCKETS, COLUMNS, FILE, as_line, sums_of_rows, sums_of_weights
from grpo_lab.diagnostics.token_weights import token_weights as weights_in
from grpo_lab.io import append_json_line
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import Carried, loss_mask
from grpo_lab.verifiers.verdict import CORRECT_FROM


class TokenWeights(TrainerCallback):  # type: ignore[misc]
    """Sums up the weights of tokens on this rank during an optimizer step, by length quartile and pass rate. At the
    step's end the sums of all ranks become a line of the file."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.every = trainer.lab_settings.token_weights_every
        self._sums: Tensor | None = None
        self._taken = True

    def is_due(self) -> bool:
        """Return whether the current optimizer step is recorded."""
        trainer = self.trainer
        return self.every is not None and trainer.model.training and trainer.state.global_step % self.every == 0

    def add_rows(self, inputs: dict[str, Any]) -> None:
        """Count the completions and tokens of a micro-batch of this rank, whether they will be computed or not. Called
        once per micro-batch."""
        if place := self._places(inputs):
            self._of_step[:, :-1] += sums_of_rows(loss_mask(inputs).cpu(), inputs["advantages"].cpu(), *place)

    def add(self, loss: Tensor, logps: Tensor, mask: Tensor, fields: Any) -> None:
        """Add the weights of the tokens in a computed loss.

        Args:
            loss: scalar, as HF trains on it: its gradients are averaged over ranks.
            logps: ``[B, T]``, the log-probs in the graph of ``loss``.
            mask: bool ``[B, T]``, loss tokens.
            fields: the rows' fields, with length quartiles and pass rates.
        """
        if place := self._places(fields):
            found = sums_of_weights(weights_in(loss, logps).cpu(), mask.cpu(), *place)
            self._of_step[:, -1] += found / self.trainer.accelerator.num_processes

    def so_far(self) -> Tensor | None:
        """Return a copy of the step's sums, for ``go_back``; None if there are none yet."""
        if self._sums is None:
            return None
        return self._sums.clone()

    def go_back(self, then: Tensor | None) -> None:
        """Restore the sums that ``so_far`` returned."""
        self._sums = None if then is None else then.clone()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._taken = not self.trainer.accelerator.optimizer_step_was_skipped  # the guard resets this flag later

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the sums of all ranks as a line, if the step was taken and all are finite; begin anew."""
        sums = self._sums
        self._sums = None
        if sums is None:
            return
        if self.trainer.accelerator.num_processes > 1:
            with named_place("token weights of all ranks"):
                sums = self.trainer.accelerator.reduce(sums.to(self.trainer.accelerator.device), "sum")
        finite = bool(sums.isfinite().all())  # without a guard a step with NaN in it is taken
        if state.is_world_process_zero and self._taken and finite:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            append_json_line(Path(args.output_dir) / FILE, as_line(state.global_step, sums))

    def _places(self, fields: Any) -> tuple[Tensor, Tensor] | None:
        """Return each row's length quartile and pass rate; None if the step is not recorded, or if the rows lack them
        (a batch from a checkpoint of an earlier version)."""
        carried = Carried(fields)
        if not self.is_due() or carried.length_quartile is None or carried.pass_rate is None:
            return None
        return carried.length_quartile.cpu(), carried.pass_rate.cpu()

    @property
    def _of_step(self) -> Tensor:
        """The step's sums ``[buckets, columns]``, which begin at 0."""
        if self._sums is None:
            self._sums = torch.zeros(BUCKETS, len(COLUMNS), dtype=torch.float64)
        return self._sums


def pass_rates(correct: Tensor | None, rows: int, group_size: int) -> Tensor:
    """Return, for each of the ``rows`` = N completions, the share of right answers in its group, ``[N]``; NaN if none
    of the group could be judged. ``correct``: ``[N]``, scores of the correctness reward, NaN if unscorable; None if the
    run has no such reward, and then all shares are NaN."""
    if correct is None:
        return torch.full((rows,), float("nan"))
    right = (correct >= CORRECT_FROM).float().masked_fill(correct.isnan(), float("nan"))
    return right.view(-1, group_size).nanmean(dim=1).repeat_interleave(group_size)
