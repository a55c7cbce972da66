"""Facts that every rank knows of all rows of an optimizer step: a few integers per row, to plan the step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import RowTable, reach
from grpo_lab.update import Rows, live_rows

COUNT_BITS = 32
"""Number of bits of a count of tokens that is sent in one number with another count."""


@dataclass(frozen=True)
class RowNumbers:
    """Facts about the ``N`` rows of all ranks, in rank order; equal on every rank. What plans need is on the host.

    Args:
        prompt_lengths, completion_lengths: long ``[N]``, tokens.
        scored: long ``[N]`` on the device, number of loss tokens.
        scores: bool ``[N]``, whether there are any loss tokens.
        contributes: bool ``[N]``, whether some loss token has an advantage (``live_rows``), and the row is not
            rejected.
        rejected: bool ``[N]``, live rows whose sampler weight is known to be 0 before any forward; left out.
        silent: bool ``[N]``, rows that the look found without a gradient (``step.look``); left out.
        micro_batch: long ``[N]`` on the device, the micro-batch of the step in which TRL had the row.
        token_count: float ``[N]`` on the device, TRL's token denominator of the row's generation batch.
        prompts: long ``[N]``, ``RowTable.prompt_numbers``; None if they were not asked for.
        scored_lengths: long ``[N]``, tokens of the completion up to its last loss token: its length in a packed row.
        footprint: padded tokens of the largest micro-batch that TRL cut, over all ranks.
        widths: field → its width, the largest of all ranks, for fields that have one.
        local_widths: field → its width on each rank.
        bytes_received: bytes that came to this rank to learn this.
    """

    prompt_lengths: Tensor
    completion_lengths: Tensor
    scored: Tensor
    scores: Tensor
    contributes: Tensor
    rejected: Tensor
    silent: Tensor
    micro_batch: Tensor
    token_count: Tensor
    prompts: Tensor | None
    scored_lengths: Tensor
    footprint: int
    widths: dict[str, int]
    local_widths: dict[str, list[int]]
    bytes_received: int = 0

    @staticmethod
    def of(
        table: RowTable, micro_batch: Tensor, token_count: Tensor, footprint: int, accelerator: Any,
        prompts: bool = False, rejected: Tensor | None = None,
    ) -> RowNumbers:  # fmt: skip
        """Gather the facts of all ranks' rows from this rank's. A collective on several ranks.

        Args:
            table: this rank's rows.
            micro_batch: long ``[n]``, the micro-batch of each row.
            token_count: float ``[n]``, TRL's token denominator of each row's generation batch.
            footprint: padded tokens of this rank's largest micro-batch.
            accelerator: of the run.
            prompts: also gather the numbers of the prompts.
            rejected: bool ``[n]``, this rank's rows whose sampler weight is known to be 0; None if none is known.

        Raises:
            RuntimeError: ranks hold different fields (a team's field that only some rows or ranks have).
        """
        named = sorted(table.fields.items())
        kinds = ", ".join(f"{name} ({value.dtype}, {value.dim()}-D, {[*value.shape[2:]]})" for name, value in named)
        mask = table.loss_mask
        prompt_lengths, completion_lengths = table.lengths
        columns = {
            "prompt": prompt_lengths,
            "completion": completion_lengths,
            "scores": mask.sum(1) + (reach(mask) << COUNT_BITS),  # two numbers travel as one
            "live": _live_or_rejected(table, rejected),
            "micro_batch": micro_batch,
            "token_count": token_count.double().view(torch.int64),  # a float travels as its bits
        }
        if prompts:
            columns["prompts"] = table.prompt_numbers
        columns["footprint"] = torch.full_like(table.offset, footprint)
        columns["kinds"] = torch.full_like(table.offset, zlib.crc32(kinds.encode()))
        own = torch.stack([column.long() for column in columns.values()], dim=1)
        wide = {name: value.size(1) for name, value in named if value.dim() > 1}
        own_widths = torch.tensor([[*wide.values()]], device=own.device)
        numbers, widths, received = _of_all_ranks(own, own_widths, kinds, accelerator)
        on_device = dict(zip(columns, numbers.unbind(1), strict=True))
        on_host = dict(zip(columns, numbers.cpu().unbind(1), strict=True))  # one transfer
        local = dict(zip(wide, widths.t().tolist(), strict=True))
        below = (1 << COUNT_BITS) - 1
        return RowNumbers(
            prompt_lengths=on_host["prompt"],
            completion_lengths=on_host["completion"],
            scored=on_device["scores"] & below,
            scores=(on_host["scores"] & below) > 0,
            contributes=on_host["live"] == 1,
            rejected=on_host["live"] == 2,
            silent=torch.zeros_like(on_host["live"], dtype=torch.bool),
            micro_batch=on_device["micro_batch"],
            token_count=on_device["token_count"].contiguous().view(torch.float64).to(token_count.dtype),
            prompts=on_host.get("prompts"),
            scored_lengths=on_host["scores"] >> COUNT_BITS,
            footprint=int(on_host["footprint"].max()),
            widths={name: max(found) for name, found in local.items()},
            local_widths=local,
            bytes_received=received,
        )

    def __len__(self) -> int:
        return self.scored.numel()

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of prompt and completion together, long ``[N]``."""
        return self.prompt_lengths + self.completion_lengths

    def others(self) -> RowNumbers:
        """Return the numbers of the same rows, in which those contribute that carry loss tokens and did not contribute
        before."""
        return replace(self, contributes=self.scores & ~self.contributes)

    def with_fields(self, names: Iterable[str]) -> RowNumbers:
        """Return the numbers of the same rows with further fields, named ``names``, that have one value per completion
        token."""
        widths = dict.fromkeys(names, self.widths["completion_ids"])
        local = dict.fromkeys(names, self.local_widths["completion_ids"])
        return replace(self, widths={**self.widths, **widths}, local_widths={**self.local_widths, **local})

    def rows(self, all_rows: bool, packed: bool = False) -> Rows:
        """Return the lengths of all rows, and which must be computed, in the form that plans read.

        Args:
            all_rows: also compute rows without an advantage.
            packed: lengths of completions are those in a packed row.
        """
        live = (self.scores if all_rows else self.contributes) & ~self.silent
        completions = self.scored_lengths if packed else self.completion_lengths
        return Rows(self.prompt_lengths, completions, live)


def _of_all_ranks(own: Tensor, own_widths: Tensor, kinds: str, accelerator: Any) -> tuple[Tensor, Tensor, int]:
    """Gather numbers ``[n, columns]`` and widths ``[1, fields]`` of all ranks; also return the bytes received.

    The last column of the numbers is a hash of ``kinds``, the fields in words. Raises RuntimeError if ranks differ in
    it.
    """
    others = accelerator.num_processes - 1
    if others == 0:
        return own, own_widths, 0
    with named_place("numbers of all rows"):
        numbers = accelerator.gather(own)
        if bool((numbers[:, -1] != numbers[0, -1]).any()):
            raise RuntimeError(
                "the ranks' micro-batches hold different fields, so rows cannot be exchanged; this rank has "
                f"{kinds}. Give every rank the same ones, in every micro-batch, or set `update: off`"
            )
        widths = accelerator.gather(own_widths)
    return numbers, widths, 8 * (own.numel() + own_widths.numel()) * others


def _live_or_rejected(table: RowTable, rejected: Tensor | None) -> Tensor:
    """Return long ``[n]``: 1 for a row with an advantage on some loss token, 2 if it is rejected, 0 for the others."""
    live = live_rows_of(table.fields, table.loss_mask).long()
    if rejected is None:
        return live
    return live * (1 + rejected.long())


def live_rows_of(fields: Mapping[str, Any], mask: Tensor) -> Tensor:
    """Return bool ``[B]``: the live rows, of which some loss token has an advantage (``live_rows``). If the rows carry
    no advantages, every row with a loss token is live."""
    advantages = fields.get("advantages")
    if advantages is None:
        return mask.any(dim=1)
    return live_rows(advantages, mask)


@dataclass(frozen=True)
class StepRows:
    """The rows of an optimizer step.

    Args:
        table: this rank's rows.
        sizes: number of rows in each of this rank's micro-batches, in the order of the table.
        slots: long ``[n]``, the micro-batch of each row.
        token_count: float ``[n]``, TRL's token denominator of each row's generation batch.
        rejected: bool ``[n]``, this rank's rows whose sampler weight is known to be 0; None if none is known.
        numbers: facts about all ranks' rows.
        budget: tokens that one forward may have.
    """

    table: RowTable
    sizes: list[int]
    slots: Tensor
    token_count: Tensor
    rejected: Tensor | None
    numbers: RowNumbers
    budget: int
