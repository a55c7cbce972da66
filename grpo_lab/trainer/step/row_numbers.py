"""What every rank knows of every row of an optimizer step: eight whole numbers. The rows themselves stay where they are."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lab.trainer.ranks.places import at
from grpo_lab.trainer.step.row_table import RowTable
from grpo_lab.update import Rows, live_rows

#: whole numbers of a row that every rank is told
COLUMNS = 8


@dataclass(frozen=True)
class RowNumbers:
    """``N`` rows of all ranks, in rank order; equal on every rank.

    Args:
        prompt_lengths, completion_lengths: long ``[N]``, tokens.
        scored: long ``[N]``, loss tokens.
        contributes: bool ``[N]``, some loss token has an advantage (``live_rows``).
        micro_batch: long ``[N]``, which micro-batch of the step TRL had the row in.
        token_count: float ``[N]``, TRL's token denominator of the row's generation batch.
        footprint: padded tokens of the largest micro-batch that TRL cut, over all ranks.
        widths: width over all ranks of each field with one, and of each rank in ``local_widths``.
    """

    prompt_lengths: Tensor
    completion_lengths: Tensor
    scored: Tensor
    contributes: Tensor
    micro_batch: Tensor
    token_count: Tensor
    footprint: int
    widths: dict[str, int]
    local_widths: dict[str, list[int]]
    bytes_received: int = 0

    @staticmethod
    def of(table: RowTable, micro_batch: Tensor, token_count: Tensor, footprint: int, accelerator: Any) -> RowNumbers:
        """From this rank's rows. A collective on several ranks.

        Raises:
            RuntimeError: ranks hold different fields (a team's field that only some rows or ranks have).
        """
        mine = _packed(table, micro_batch, token_count, footprint)
        names = [name for name, value in sorted(table.fields.items()) if value.dim() > 1]
        widths = torch.tensor([[table.fields[name].size(1) for name in names]], device=mine.device)
        received = 0
        if accelerator.num_processes > 1:
            received = 8 * (mine.numel() + widths.numel()) * (accelerator.num_processes - 1)
            with at("numbers of all rows"):
                mine = accelerator.gather(mine)
                _check_alike(mine[:, -1], table)
                widths = accelerator.gather(widths)
        prompts, completions, scored, contributes, slots, counts, footprints, _ = mine.unbind(1)
        local = dict(zip(names, widths.t().tolist(), strict=True))
        return RowNumbers(
            prompts,
            completions,
            scored,
            contributes.bool(),
            slots,
            counts.contiguous().view(torch.float64).to(token_count.dtype),
            int(footprints.max()),
            {name: max(found) for name, found in local.items()},
            local,
            received,
        )

    def __len__(self) -> int:
        return self.scored.numel()

    def rows(self, all_rows: bool) -> Rows:
        """For the plan; ``all_rows``: those without an advantage, too."""
        live = self.scored > 0 if all_rows else self.contributes
        columns = torch.stack([self.prompt_lengths, self.completion_lengths, live.long()]).tolist()
        return Rows(columns[0], columns[1], [bool(flag) for flag in columns[2]])


def _packed(table: RowTable, micro_batch: Tensor, token_count: Tensor, footprint: int) -> Tensor:
    """Long ``[n, COLUMNS]``; a float travels as its bits."""
    mask = table.loss_mask
    contributes = live_rows(table.advantages, mask) if "advantages" in table.fields else mask.any(dim=1)
    same = torch.ones_like(table.offset)
    columns = (
        *(*table.lengths, mask.sum(1), contributes.long(), micro_batch),
        *(token_count.double().view(torch.int64), same * footprint, same * _kind(table)),
    )
    return torch.stack([column.long() for column in columns], dim=1)


def _kind(table: RowTable) -> int:
    """A checksum of the fields' names and types, which all ranks must share to read each other's rows."""
    kinds = [
        f"{name} {value.dtype} {tuple(value.shape[2:])} {value.dim()}" for name, value in sorted(table.fields.items())
    ]
    return zlib.crc32("; ".join(kinds).encode())


def _check_alike(kinds: Tensor, table: RowTable) -> None:
    if bool((kinds != kinds[0]).any()):
        fields = ", ".join(f"{name} ({value.dtype})" for name, value in sorted(table.fields.items()))
        raise RuntimeError(
            f"the ranks' micro-batches hold different fields, so rows cannot be exchanged; this rank has {fields}. Give every rank "
            "the same ones, in every micro-batch, or set `update: off`, where no row moves"
        )


__all__ = ["COLUMNS", "RowNumbers"]
