"""The rows of one optimizer step: this rank's as a table, bins cut from it, and what every rank knows of all rows.

TRL hands over micro-batches whose rows are padded to the longest prompt and completion of the whole generation batch.
Here they become a table with one row per completion; a bin is some rows of it, each written contiguously (prompt
directly followed by completion) and padded on the right to the longest row *of the bin*. Of rows elsewhere a rank knows
a few whole numbers (``RowNumbers``).
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_lab.trainer.carried import POLICY_VERSION, POSITION_OFFSET, Carried, loss_mask, row_lengths, row_tensors
from grpo_lab.trainer.ranks import at
from grpo_lab.trainer.trl_bridge import COMPLETION_FIELDS
from grpo_lab.update import Rows, live_rows

#: what padding is filled with where it is not 0; TRL sums the log of the ratio over padding, too
#: (``loss_type="vespo"``)
FILL = {"importance_sampling_ratio": 1}


@dataclass(frozen=True)
class Bin:
    """Inputs of one forward: n rows of at most L tokens with completions of at most T tokens.

    ``labels`` ``[n, L]`` name the tokens whose log-prob the loss reads, −100 elsewhere (prompts, padding, tool
    outputs). ``attention_mask`` ``[n, L]`` only where a mask has a hole, to which no token attends: padding stands on
    the right, where a causal model does not look. ``fields`` are the table's per-row tensors cut to the bin, per-token
    ones to ``[n, T]``; ``take`` ``[n, T]`` picks, for each completion token, its log-prob among the ``L - 1`` of the
    forward. ``micro_batch`` long ``[n]``: which one of the step TRL had the row in; ``token_count`` float ``[n]``:
    TRL's token denominator of the row's generation batch (both where the step's numbers are known, see
    ``row_numbers``).
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    take: Tensor
    loss_mask: Tensor
    fields: dict[str, Tensor]
    micro_batch: Tensor | None = None
    token_count: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What ``trl_bridge.completion_log_probs`` forwards."""
        return self.input_ids, self.labels, self.position_ids, self.attention_mask


@dataclass(frozen=True)
class RowTable:
    """``N`` rows: prompts left-padded to P, completions right-padded to T, and what belongs to each row.

    ``offset`` is the position index that TRL's padding gives the first prompt token of the row (TRL feeds no position
    ids, so rotary angles depend on it); bins keep it, and thus TRL's numbers. ``per_token`` names the fields ``[N, T]``
    that follow the completion.
    """

    fields: dict[str, Tensor]
    offset: Tensor
    per_token: frozenset[str]

    @staticmethod
    def of(window: list[dict[str, Any]]) -> RowTable:
        """Table of an optimizer step's micro-batches (this rank). Widths may differ between generation batches."""
        rows = [row_tensors(batch) for batch in window]
        names = set.intersection(*(set(row) for row in rows)) - {POSITION_OFFSET, POLICY_VERSION}
        offset = torch.cat([row.get(POSITION_OFFSET, row["prompt_ids"].size(1) - row_lengths(row)[0]) for row in rows])
        widths = {name: max(row[name].size(1) for row in rows) for name in names if rows[0][name].dim() > 1}
        fields = {
            name: torch.cat([_widen(name, row[name], widths.get(name)) for row in rows]) for name in sorted(names)
        }
        return RowTable(fields, offset, per_token_fields(widths))

    def gathered(self, accelerator: Any) -> RowTable:
        """The rows of all ranks, in rank order; the same on every rank. Everything travels: a step exchanges only what
        moves (``exchange``)."""
        if accelerator.num_processes == 1:
            return self
        fields = {}
        for name, value in self.fields.items():
            if value.dim() > 1:
                value = accelerator.pad_across_processes(
                    value, dim=1, pad_index=FILL.get(name, 0), pad_first=is_of_prompt(name)
                )
            fields[name] = accelerator.gather(value.contiguous())
        widths = {name: value.size(1) for name, value in fields.items() if value.dim() > 1}
        return RowTable(fields, accelerator.gather(self.offset), per_token_fields(widths))

    @functools.cached_property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Of prompts and completions (``row_lengths``)."""
        return row_lengths(self.fields)

    @property
    def loss_mask(self) -> Tensor:
        """bool ``[N, T]``: tokens that carry loss (completion tokens that the policy itself made)."""
        return loss_mask(self.fields)

    @property
    def advantages(self) -> Tensor:
        """``[N, 1]`` or ``[N, T]``."""
        advantages = self.fields["advantages"]
        return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages

    def bin(self, rows: list[int], limit: int | None = None) -> Bin:
        """Rows ``rows`` as one forward. No rows: a stand-in of two tokens that carries no loss, for ranks in step.

        Args:
            limit: how many positions the model knows. A row that is shorter than the bin's longest and had more padding
                at generation would be padded past them; padding stops at the last one.
        """
        index = torch.tensor(rows or [0], device=self.offset.device)
        prompt, completion = (lengths[index] for lengths in self.lengths)
        start = self.fields["prompt_ids"].size(1) - prompt
        if not rows:
            start, prompt, completion = start + prompt - 1, torch.ones_like(prompt), torch.ones_like(completion)
        length = int((prompt + completion).max())
        width = max(int(completion.max()), 1)
        sequence, attended = (
            torch.cat([self.fields[f"prompt_{of}"][index], self.fields[f"completion_{of}"][index]], dim=1)
            for of in ("ids", "mask")
        )
        steps = torch.arange(length, device=index.device)
        real = steps < (prompt + completion).unsqueeze(1)
        picked = (start.unsqueeze(1) + steps).clamp(max=sequence.size(1) - 1)
        input_ids, attended = sequence.gather(1, picked), attended.gather(1, picked).bool() & real
        fields = {
            name: value[index] for name, value in self.fields.items() if name not in ("prompt_ids", "prompt_mask")
        }
        fields = {name: value[:, :width] if name in self.per_token else value for name, value in fields.items()}
        loss_mask = self.loss_mask[index, :width] & bool(rows)
        own = (
            loss_mask.gather(1, (steps - prompt.unsqueeze(1)).clamp(0, width - 1))
            & (steps >= prompt.unsqueeze(1))
            & real
        )
        first = self.offset[index] + start - (self.fields["prompt_ids"].size(1) - self.lengths[0][index])
        positions = first.unsqueeze(1) + steps
        if limit is not None:
            positions = torch.where(real, positions, positions.clamp(max=limit - 1))
        return Bin(
            input_ids=input_ids,
            labels=input_ids.masked_fill(~own, -100),
            position_ids=positions,
            attention_mask=attended.long() if rows and bool((attended != real).any()) else None,
            take=(prompt.unsqueeze(1) - 1 + torch.arange(width, device=index.device)).clamp(max=length - 2),
            loss_mask=loss_mask,
            fields=fields,
        )


def per_token_fields(widths: dict[str, int]) -> frozenset[str]:
    """Fields that follow the completion, from the widths over all ranks: TRL's, and a team's that are as wide."""
    wide = widths.get("completion_ids")
    return frozenset(
        name
        for name, width in widths.items()
        if name in COMPLETION_FIELDS or (width == wide and not is_of_prompt(name))
    )


def is_of_prompt(name: str) -> bool:
    """Whether a field belongs to the prompt, and is padded on the left."""
    return name.startswith("prompt_")


def positions_at_generation(inputs: dict[str, Any]) -> Tensor | None:
    """Position ids ``[B, P + T]`` that put each row where the padding of its own generation batch had it.

    ``None`` where the batch is as it was generated. Padding gets the nearest position that the row has.
    """
    first = Carried(inputs).position_offset
    if first is None:
        return None
    prompts, completions = row_lengths(inputs)
    width = inputs["prompt_ids"].size(1)
    steps = torch.arange(width + inputs["completion_ids"].size(1), device=first.device)
    moved = (first - (width - prompts)).unsqueeze(1) + steps
    last = (first + prompts + completions - 1).clamp(min=0).unsqueeze(1)
    return torch.minimum(moved.clamp(min=0), last)


def _widen(name: str, value: Tensor, width: int | None) -> Tensor:
    if width is None or value.size(1) == width:
        return value
    missing = width - value.size(1)
    edges = (missing, 0) if is_of_prompt(name) else (0, missing)
    return pad(value, (0, 0) * (value.dim() - 2) + edges, value=FILL.get(name, 0))


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
    """Long ``[n, 8]``; a float travels as its bits."""
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
            f"the ranks' micro-batches hold different fields, so rows cannot be exchanged; this rank has {fields}. "
            "Give every rank "
            "the same ones, in every micro-batch, or set `update: off`, where no row moves"
        )
