"""Rows of an optimizer step, brought to the ranks that the plan puts them on; what is made of them, brought home.

Only rows that move travel, as wide as the bin that they go to: one message of bytes for each pair of ranks, whatever
the types and widths, without a header, since the plan and the widths are the same everywhere. Where nothing moves, no
collective is called. One rank: nothing is copied. gloo and NCCL alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from grpo_lab.trainer.ranks import at
from grpo_lab.trainer.rows import FILL, Bin, RowNumbers, RowTable, is_of_prompt, per_token_fields
from grpo_lab.update import Plan, Routes

Ints = NDArray[np.int64]
#: types on the way where they need fewer bytes than in memory: token ids are below 2³¹, masks are 0 or 1
_ON_THE_WAY = {
    **dict.fromkeys(("prompt_ids", "completion_ids"), torch.int32),
    **dict.fromkeys(("completion_mask", "tool_mask"), torch.uint8),
}
_OFFSET = "offset of the row"  # ``RowTable.offset`` beside the fields


@dataclass(frozen=True)
class Column:
    """One field of the rows that are sent: ``values`` 1-D, ``lengths`` ``[rows]`` numbers of each row, in the order of
    the rows."""

    values: Tensor
    lengths: Ints


@dataclass(frozen=True)
class Expected:
    """One field of the rows that are received."""

    dtype: torch.dtype
    lengths: Ints


def swap(
    sent: list[Column], to: Ints, expected: list[Expected], origins: Ints, num_ranks: int, device: Any
) -> tuple[list[Tensor], int]:
    """Send each row's numbers to its rank; what was received, field by field and 1-D, and its bytes. A collective.

    Args:
        to: the rank that each row sent goes to, ascending.
        origins: the rank that each row received comes from, ascending.
    """
    leaving = _bytes([(column.values.element_size(), column.lengths) for column in sent], to, num_ranks)
    arriving = _bytes([(one.dtype.itemsize, one.lengths) for one in expected], origins, num_ranks)
    pieces = [
        column.values.contiguous().view(torch.uint8).split(sizes.tolist())
        for column, sizes in zip(sent, leaving, strict=True)
    ]
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    message = torch.cat([nothing, *(part for rank in zip(*pieces, strict=True) for part in rank if part.numel())])
    received = torch.empty(int(arriving.sum()), dtype=torch.uint8, device=device)
    torch.distributed.all_to_all_single(received, message, arriving.sum(0).tolist(), leaving.sum(0).tolist())
    del pieces, message
    ends = arriving.T.cumsum().reshape(num_ranks, len(expected)).T  # a message holds its fields one after the other
    found = []
    for one, sizes, last in zip(expected, arriving, ends, strict=True):
        parts = [received[end - size : end] for size, end in zip(sizes.tolist(), last.tolist(), strict=True) if size]
        found.append(torch.cat([nothing, *parts]).view(one.dtype))
    return found, received.numel()


def _bytes(fields: list[tuple[int, Ints]], ranks: Ints, num_ranks: int) -> Ints:
    """``[fields, num_ranks]``: bytes of each field in the message of each rank."""
    found = np.zeros((len(fields), num_ranks), dtype=np.int64)
    for place, (size, lengths) in enumerate(fields):
        np.add.at(found[place], ranks, lengths * size)
    return found


class Exchange:
    """The rows of one optimizer step (or of one to come) that this rank computes.

    Args:
        local: the rows that were generated here; ``held`` takes its place, and what left is freed with it.
        numbers: what is known of all rows.
        plan: which rank computes which of them.
    """

    def __init__(self, local: RowTable, numbers: RowNumbers, plan: Plan, accelerator: Any) -> None:
        self.numbers, self.bins = numbers, plan.bins[accelerator.process_index]
        self.bytes_received = numbers.bytes_received
        self._rank, self._ranks = accelerator.process_index, accelerator.num_processes
        self._device = local.offset.device
        self._shape = tuple(local.fields["completion_ids"].shape)
        self._first = self._rank * self._shape[0]
        self._places: dict[int, int] | None = None
        self._moves, self.held = False, local
        if self._ranks > 1:
            routes = Routes.of(plan, numbers.completion_lengths.cpu().numpy(), self._shape[0])
            self._moves = bool(routes.moves.any())
            self._leaving, self._arriving = routes.leaving(self._rank), routes.arriving(self._rank)
            self.held = self._brought(local, routes)

    def bin(self, rows: list[int], limit: int | None = None) -> Bin:
        """Rows of the step that this rank holds, as one forward (``RowTable.bin``)."""
        places = rows if self._places is None else [self._places[row] for row in rows]
        index = torch.tensor(rows or [0], device=self._device)
        slots, counts = self.numbers.micro_batch[index], self.numbers.token_count[index]
        return replace(self.held.bin(places, limit), micro_batch=slots, token_count=counts)

    # -- there -------------------------------------------------------------------------------------------------------

    def _brought(self, local: RowTable, routes: Routes) -> RowTable:
        """The rows that the plan puts here; where it has none, one row for the stand-in. A collective if any row
        moves."""
        layout = _Layout(self.numbers)
        stay = routes.rows[(routes.homes == self._rank) & (routes.ranks == self._rank)]
        if stay.size + self._arriving.rows.size == 0:
            stay = np.asarray([self._first])
        held = np.concatenate([stay, self._arriving.rows])
        self._places = {row: place for place, row in enumerate(held.tolist())}
        prompts, inside = local.fields["prompt_ids"], local.fields["prompt_mask"].bool()
        sent = {
            **local.fields,
            "prompt_ids": torch.where(inside, prompts, ~prompts),
            _OFFSET: local.offset,
        }  # < 0: a hole
        del sent["prompt_mask"]
        came = self._swapped(sent, layout) if self._moves else {}
        index = torch.as_tensor(stay - self._first, device=self._device)
        fields = {}
        for name, value in sent.items():
            parts = [value[index]]
            if name in came:
                parts.append(came[name])
            if value.dim() > 1:
                width = layout.held_width(name, held)
                parts = [_fitted(name, part, width) for part in parts]
            fields[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        offset = fields.pop(_OFFSET)
        prompts, inside = fields["prompt_ids"], fields["prompt_ids"] >= 0
        own = _within(layout.prompts[held], prompts.size(1), self._device, on_the_right=True) & inside
        fields["prompt_ids"] = torch.where(inside, prompts, ~prompts)
        fields["prompt_mask"] = own.to(local.fields["prompt_mask"].dtype)
        return RowTable(fields, offset, layout.per_token)

    def _swapped(self, sent: dict[str, Tensor], layout: _Layout) -> dict[str, Tensor]:
        """Fields of the rows that arrive, each as wide as its widest."""
        leaving = torch.as_tensor(self._leaving.rows - self._first, device=self._device)
        columns, expected = [], []
        for name, value in sent.items():
            kind, numbers = _ON_THE_WAY.get(name, value.dtype), int(np.prod(value.shape[2:]))
            lengths = layout.lengths(name, value.dim(), self._leaving)
            chosen = value[leaving]
            if value.dim() > 1:
                chosen = chosen[_within(lengths, value.size(1), self._device, is_of_prompt(name))]
            columns.append(Column(chosen.to(kind).flatten(), lengths * numbers))
            expected.append(Expected(kind, layout.lengths(name, value.dim(), self._arriving) * numbers))
        found = self._exchanged(columns, self._leaving.ranks, expected, self._arriving.homes)
        came = {}
        for (name, value), flat in zip(sent.items(), found, strict=True):
            flat = flat.to(value.dtype)
            lengths = layout.lengths(name, value.dim(), self._arriving)
            came[name] = flat if value.dim() == 1 else _laid_out(name, flat, lengths, value.shape[2:])
        return came

    # -- and back ----------------------------------------------------------------------------------------------------

    def home(
        self, made: list[tuple[list[int], Tensor]], on_the_way: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Numbers per token of the rows that were computed, to the ranks that generated the rows. A collective if any
        moved.

        Args:
            made: for each of this rank's bins its rows and ``[rows, t]``, 0 beyond a completion.
            on_the_way: their type between several ranks, the same on all (a rank may have made none). One rank keeps
                theirs.

        Returns:
            For the rows that were generated here ``[n, T]``, 0 where no bin held one, and bool ``[n, 1]``, where one
            did.
        """
        dtype = made[0][1].dtype if made and self._ranks == 1 else on_the_way
        found = torch.zeros(self._shape, dtype=dtype, device=self._device)
        done = torch.zeros(self._shape[0], 1, dtype=torch.bool, device=self._device)
        away: dict[int, Tensor] = {}
        for rows, values in made:
            here = [self._first <= row < self._first + self._shape[0] for row in rows]
            stay = [place for place, mine in enumerate(here) if mine]
            mine, width = [rows[place] - self._first for place in stay], min(values.size(1), self._shape[1])
            found[mine, :width] = values[stay, :width].to(dtype)
            done[mine] = True
            away |= {rows[place]: values[place] for place, mine in enumerate(here) if not mine}
        if self._moves:
            mine = (self._leaving.rows - self._first).tolist()
            found[mine], done[mine] = self._returned(away, dtype), True
        return found, done

    def _returned(self, away: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
        """``[rows that left, T]``: what other ranks made of them, in exchange for what this one made of theirs."""
        completions = self.numbers.completion_lengths.cpu().numpy()
        made, wanted = completions[self._arriving.rows], completions[self._leaving.rows]
        values = [away[row][:length] for row, length in zip(self._arriving.rows.tolist(), made.tolist(), strict=True)]
        column = Column(torch.cat([torch.empty(0, device=self._device), *values]).to(dtype), made)
        (flat,) = self._exchanged([column], self._arriving.homes, [Expected(dtype, wanted)], self._leaving.ranks)
        return _fitted("", _laid_out("", flat, wanted, ()), self._shape[1])

    def _exchanged(self, columns: list[Column], to: Ints, expected: list[Expected], origins: Ints) -> list[Tensor]:
        with at("exchange of rows"):
            found, received = swap(columns, to, expected, origins, self._ranks, self._device)
        self.bytes_received += received
        return found


class _Layout:
    """How many numbers of a field travel with a row, and how wide the field is where rows are held."""

    def __init__(self, numbers: RowNumbers) -> None:
        self.prompts, self.completions = (
            lengths.cpu().numpy() for lengths in (numbers.prompt_lengths, numbers.completion_lengths)
        )
        self.per_token = per_token_fields(numbers.widths)
        self._numbers = numbers

    def lengths(self, name: str, dims: int, routes: Routes) -> Ints:
        """``[rows]``: without prompt padding, and for a field per token as wide as the bin that the row goes to, or
        less."""
        if dims == 1:
            return np.ones_like(routes.rows)
        if name == "prompt_ids":
            found: Ints = self.prompts[routes.rows]
            return found
        padded = np.asarray(self._numbers.local_widths[name], dtype=np.int64)[routes.homes]
        return np.minimum(routes.widths, padded) if name in self.per_token else padded

    def held_width(self, name: str, held: Ints) -> int:
        if name == "prompt_ids":
            return int(self.prompts[held].max())
        return max(1, int(self.completions[held].max())) if name in self.per_token else self._numbers.widths[name]


def _within(lengths: Ints, width: int, device: Any, on_the_right: bool) -> Tensor:
    """bool ``[rows, width]``: the first (or last) ``lengths`` places."""
    size = torch.as_tensor(lengths, device=device).unsqueeze(1)
    steps = torch.arange(width, device=device)
    return steps >= width - size if on_the_right else steps < size


def _laid_out(name: str, flat: Tensor, lengths: Ints, further: tuple[int, ...]) -> Tensor:
    """``[rows, longest, …]`` of the rows' numbers one after the other."""
    width = int(lengths.max()) if lengths.size else 0
    keep = _within(lengths, width, flat.device, is_of_prompt(name)).reshape(len(lengths), width, *(1 for _ in further))
    shape = (len(lengths), width, *further)
    return torch.full(shape, FILL.get(name, 0), dtype=flat.dtype, device=flat.device).masked_scatter(keep, flat)


def _fitted(name: str, value: Tensor, width: int) -> Tensor:
    """``[rows, width, …]``: cut, or filled up, where the padding is."""
    missing = width - value.size(1)
    if missing < 0:
        return value[:, -missing:] if is_of_prompt(name) else value[:, :width]
    edges = (missing, 0) if is_of_prompt(name) else (0, missing)
    return pad(value, (0, 0) * (value.dim() - 2) + edges, value=FILL.get(name, 0))
