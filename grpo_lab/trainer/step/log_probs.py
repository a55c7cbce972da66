"""Log-probs at generation (the old policy's, the reference's) in bins, and only where something reads them.

TRL forwards every completion padded to the longest of the generation batch, before it knows the rewards. Here the same
numbers come from bins without padding (``row_table``), under the conditions that the exact update checks. The old
policy's forward is put off until the first optimizer step of the batch, whose training forward has most of the numbers
anyway (``old_policy``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.carried import POSITION_OFFSET, Carried
from grpo_lab.trainer.exactness.model_conditions import position_limit
from grpo_lab.trainer.exactness.part_questions import has_team_parts
from grpo_lab.trainer.rows import Bin, RowTable
from grpo_lab.update import Rows, default_max_tokens, plan_update

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort


@dataclass(frozen=True)
class GenerationForwards:
    """What happens to TRL's forwards at generation.

    Args:
        misaligned: completions outlive an optimizer step, so the loss needs log-probs of the policy that made them.
        corrected: TRL would make the sampler correction at generation.
        in_bins: bins give TRL's numbers.
        put_off: the old policy's forward is not run where TRL asks for it (before the rewards are known).
        draws: forwards are random (dropout). TRL's old log-probs then have masks of their own, independent of those
            that the loss is trained under, and its ratio is not 1 while the policy stands still. So it is here: nothing
            is put off or replaced by the loss's own forward.
    """

    misaligned: bool
    corrected: bool
    in_bins: bool
    put_off: bool
    draws: bool = False

    @staticmethod
    def of(trainer: StepPort) -> GenerationForwards:
        """Looked at anew for every generation batch."""
        misaligned, corrected = trl_bridge.wants_old_log_probs(trainer)
        wanted = misaligned or corrected
        if not trainer.model.training or not (wanted or trainer.beta != 0):
            return GenerationForwards(misaligned, corrected, in_bins=False, put_off=False)
        found = trainer.exact_update.verdict.now()
        in_bins = found.stock is None
        switches = misaligned and has_team_parts(
            trainer
        )  # a team's part may act a step later on rows that are left out now
        put_off = in_bins and wanted and not found.draws and not switches and _stays_ours(trainer)
        return GenerationForwards(misaligned, corrected, in_bins, put_off, found.draws)

    def instead_of_trls(self, trainer: StepPort) -> contextlib.AbstractContextManager[list[str]]:
        """Context for TRL's generation; gives a list that names the forward that was put off (images: none is)."""
        if not self.in_bins:
            return contextlib.nullcontext([])

        def forward(model: Any, input_ids: Tensor, attention_mask: Tensor, width: int) -> Tensor:
            prompt = input_ids.size(1) - width
            fields = {
                "prompt_ids": input_ids[:, :prompt],
                "prompt_mask": attention_mask[:, :prompt],
                "completion_ids": input_ids[:, prompt:],
                "completion_mask": attention_mask[:, prompt:],
            }
            return log_probs_in_bins(trainer, model, fields)

        return trl_bridge.forwards_replaced(trainer, forward, without_policy=self.put_off)

    def mark(self, output: dict[str, Any]) -> None:
        """Old log-probs that bins made here, since a team's method may read them: beside a copy, so that what it
        changed is known."""
        carried = Carried(output)
        if self.in_bins and not self.put_off and not self.draws and carried.proximal_logps is not None:
            carried.as_generated = carried.proximal_logps.clone()


def _stays_ours(trainer: StepPort) -> bool:
    """Whether no team stands between a generation batch and its loss, where it may read what is put off."""
    between = ("_generate_and_score_completions", "_generate_and_score", "_prepare_inputs")
    return all(trl_bridge.teams(trainer, method) is None for method in between)


@torch.no_grad()
def log_probs_in_bins(trainer: StepPort, model: Any, fields: dict[str, Any]) -> Tensor:
    """Log-probs ``[B, T]`` in nats of this rank's completions under ``model``, 0 for rows without a token."""

    def of(part: Bin) -> Tensor:
        scored, _ = trl_bridge.completion_log_probs(trainer, model, *part.inputs)
        return scored

    return forwards_in_bins(trainer, model, fields, of)


@torch.no_grad()
def forwards_in_bins(trainer: StepPort, model: Any, fields: dict[str, Any], of: Callable[[Bin], Tensor]) -> Tensor:
    """What ``of`` makes of each bin ``[n, L - 1]``, as ``[B, T]`` of this rank's completions, 0 for rows without a
    token.

    Args:
        fields: ``prompt_ids``, ``prompt_mask`` (padded left), ``completion_ids``, ``completion_mask`` (padded right);
            of rows that were put together from several generations also where each stood in its own.

    Every rank runs the same number of forwards (with sharded weights each one is a collective).
    """
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", POSITION_OFFSET)
    table = RowTable.of([{name: fields[name] for name in names if name in fields}])
    prompts, completions = (lengths.tolist() for lengths in table.lengths)
    chosen = [length > 0 for length in completions]
    shape = fields["prompt_ids"].size(1), fields["completion_ids"].size(1)
    rows_at_once = min(trainer.args.per_device_train_batch_size, len(prompts))
    budget = trainer.lab_settings.update.max_tokens or default_max_tokens(rows_at_once, *shape)
    (bins,) = plan_update(Rows(prompts, completions, chosen), 1, budget).bins
    rounds = trainer.accelerator.gather(torch.tensor([len(bins)], device=table.offset.device)).max().item()
    found = torch.zeros(fields["completion_ids"].shape, device=table.offset.device)
    limit = position_limit(trainer.accelerator.unwrap_model(model))
    with trl_bridge.without_checkpointing(trainer):
        for rows in bins + [[]] * (int(rounds) - len(bins)):
            part = table.bin(rows, limit)
            made = of(part).gather(1, part.take).masked_fill(~part.loss_mask, 0.0)
            found[rows, : made.size(1)] = made[: len(rows)].to(found.dtype)
    return found
