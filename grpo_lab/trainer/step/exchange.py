"""Send the rows of an optimizer step to the ranks that the plan assigns them to, and send results back.

Only rows that move are sent, as wide as the bin that they go to. Each pair of ranks exchanges one message of bytes,
whatever the types and widths of its fields. It needs no header, since the plan and the widths are known to all ranks.
If nothing moves, no collective is called. With one rank nothing is copied. It works with gloo and NCCL alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.row_table import FILL, Bin, RowTable, fitted, is_of_prompt, on_device, per_token_fields
from grpo_lab.trainer.step.row_numbers import RowNumbers
from grpo_lab.update import Plan, Routes

Ints = NDArray[np.int64]
#: For each of a rank's bins: its rows, and a number for each of their tokens, ``[rows, t]``, 0 beyond a completion.
Collected = list[tuple[list[int], Tensor]]
#: Types for sending, where they need fewer bytes than in memory. Token ids are below 2³¹, masks are 0 or 1.
_ON_THE_WAY = {
    **dict.fromkeys(("prompt_ids", "completion_ids"), torch.int32),
    **dict.fromkeys(("completion_mask", "tool_mask"), torch.uint8),
}
_OFFSET = "offset of the row"  # ``RowTable.offset`` beside the fields


@dataclass(frozen=True)
class Forwarded:
    """Results of forwards over this rank's rows of a step, on whichever rank they ran.

    Args:
        logps: ``[n, T]`` log-probs, 0 where no bin held the row.
        made: bool ``[n, 1]``: whether a bin held the row.
        entropies: ``[n, T]`` in nats; None if they were not asked for.
        tokens: tokens of the bins of all ranks, padding included.
        bytes_received: bytes that came to this rank.
    """

    logps: Tensor
    made: Tensor
    entropies: Tensor | None = None
    tokens: int = 0
    bytes_received: int = 0

    def joined(self, other: Forwarded) -> Forwarded:
        """Return both results; ``other`` holds further rows of the same step."""
        entropies = None
        if self.entropies is not None and other.entropies is not None:
            entropies = torch.where(other.made, other.entropies, self.entropies)
        return Forwarded(
            torch.where(other.made, other.logps, self.logps),
            self.made | other.made,
            entropies,
            self.tokens + other.tokens,
            self.bytes_received + other.bytes_received,
        )


class Exchange:
    """The rows of one optimizer step (or of a later one) that this rank computes.

    Args:
        local: the rows that were generated here. ``held`` takes its place, so that rows that left are freed with it.
        numbers: facts about all rows.
        plan: which rank computes which of them.
        accelerator: of the run, for this rank's number and the number of ranks.

    Attributes:
        bins: the rows of each of this rank's bins, as numbers among all rows of the step.
        held: the table of the rows that this rank computes.
        bytes_received: bytes that came to this rank so far.
    """

    def __init__(self, local: RowTable, numbers: RowNumbers, plan: Plan, accelerator: Any) -> None:
        self.numbers = numbers
        self.bins = plan.bins[accelerator.process_index]
        self.bytes_received = numbers.bytes_received
        self._shared = plan.shared
        self._rank = accelerator.process_index
        self._ranks = accelerator.num_processes
        self._device = local.offset.device
        self._shape = tuple(local.fields["completion_ids"].shape)
        self._first = self._rank * self._shape[0]
        self._places: dict[int, int] | None = None
        self._moves = False
        self.held = local
        if self._ranks > 1:
            self._prompts = numbers.prompt_lengths.numpy()
            self._completions = numbers.completion_lengths.numpy()
            self._per_token = per_token_fields(numbers.widths)
            routes = Routes.of(plan, self._completions, self._shape[0])
            self._moves = bool(routes.moves.any())
            self._leaving = routes.leaving(self._rank)
            self._arriving = routes.arriving(self._rank)
            self.held = self._brought(local, routes)
        self.held.prepared()
        here = [self._here(rows) for rows in self.bins]
        sent = on_device([*self.bins, *here], self._device)
        #: for the rows of each bin, on the device: their numbers among all rows, and their places in ``held``
        self._sent = dict(zip(map(tuple, self.bins), zip(sent, sent[len(here) :], strict=False), strict=True))

    def bin(self, rows: list[int], limit: int | None = None) -> Bin:
        """Return rows that this rank holds as one forward (``RowTable.bin``). For a bin of the plan, the host does not
        wait for the device. ``limit``: number of positions that the model knows."""
        numbers, places = self._sent.get(tuple(rows)) or on_device([rows, self._here(rows)], self._device)
        found = self.held.bin(self._here(rows), limit, self._shared, places)
        slots = self.numbers.micro_batch[numbers]
        counts = self.numbers.token_count[numbers]
        return replace(found, micro_batch=slots, token_count=counts)

    def tokens(self, rows: list[int]) -> int:
        """Return the tokens that the plan counts for a bin of these rows; 0 for a dummy."""
        if not rows:
            return 0
        numbers = self.numbers
        prompts = numbers.prompt_lengths[rows]
        if not self._shared:
            return len(rows) * int((prompts + numbers.completion_lengths[rows]).max())
        assert numbers.prompts is not None  # by them they are shared
        each = dict(zip(numbers.prompts[rows].tolist(), prompts.tolist(), strict=True))
        return sum(each.values()) + int(numbers.scored_lengths[rows].sum())

    def _here(self, rows: list[int]) -> list[int]:
        """Return the places of rows in ``held``."""
        if self._places is None:
            return rows
        return [self._places[row] for row in rows]

    def _brought(self, local: RowTable, routes: Routes) -> RowTable:
        """Return the rows that the plan assigns to this rank, or one row for a dummy if there are none. A collective if
        any row moves."""
        stay = routes.rows[(routes.homes == self._rank) & (routes.ranks == self._rank)]
        if stay.size + self._arriving.rows.size == 0:
            stay = np.asarray([self._first])
        held = np.concatenate([stay, self._arriving.rows])
        self._places = {row: place for place, row in enumerate(held.tolist())}
        prompts = local.fields["prompt_ids"]
        inside = local.fields["prompt_mask"].bool()
        # an id outside the mask travels as ~id < 0, so the mask is not sent
        sent = {**local.fields, "prompt_ids": torch.where(inside, prompts, ~prompts), _OFFSET: local.offset}
        del sent["prompt_mask"]
        came = {}
        if self._moves:
            came = self._swapped(sent)
        index = torch.as_tensor(stay - self._first, device=self._device)
        fields = {}
        for name, value in sent.items():
            parts = [value[index]]
            if name in came:
                parts.append(came[name])
            if value.dim() > 1:
                parts = [fitted(name, part, self._held_width(name, held)) for part in parts]
            fields[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        offset = fields.pop(_OFFSET)
        marked = fields["prompt_ids"]
        inside = marked >= 0
        in_prompt = _within(self._prompts[held], marked.size(1), self._device, on_the_right=True)
        fields["prompt_ids"] = torch.where(inside, marked, ~marked)
        fields["prompt_mask"] = (in_prompt & inside).to(local.fields["prompt_mask"].dtype)
        return RowTable(fields, offset, self._per_token)

    def _held_width(self, name: str, held: Ints) -> int:
        """Return how wide the field ``name`` is in ``held``, the rows ``held`` of the step."""
        if name == "prompt_ids":
            return int(self._prompts[held].max())
        if name in self._per_token:
            return max(1, int(self._completions[held].max()))
        return self.numbers.widths[name]

    def _lengths(self, name: str, dims: int, routes: Routes) -> Ints:
        """Return ``[rows]``: how many numbers of the field ``name`` are sent for each row of ``routes``. Prompt padding
        is not sent; a field per token is at most as wide as the bin that the row goes to."""
        if dims == 1:
            return np.ones_like(routes.rows)
        if name == "prompt_ids":
            return np.asarray(self._prompts[routes.rows])
        padded = np.asarray(self.numbers.local_widths[name], dtype=np.int64)[routes.homes]
        if name in self._per_token:
            return np.minimum(routes.widths, padded)
        return padded

    def _swapped(self, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send the fields of the leaving rows; return those of the arriving rows, each as wide as its widest row. A
        collective."""
        leaving = torch.as_tensor(self._leaving.rows - self._first, device=self._device)
        columns = []
        expected = []
        for name, value in sent.items():
            kind = _ON_THE_WAY.get(name, value.dtype)
            numbers = int(np.prod(value.shape[2:]))
            lengths = self._lengths(name, value.dim(), self._leaving)
            chosen = value[leaving]
            if value.dim() > 1:
                chosen = chosen[_within(lengths, value.size(1), self._device, is_of_prompt(name))]
            columns.append((chosen.to(kind).flatten(), lengths * numbers))
            expected.append((kind, self._lengths(name, value.dim(), self._arriving) * numbers))
        found = self._exchanged(columns, self._leaving.ranks, expected, self._arriving.homes)
        came = {}
        for (name, value), flat in zip(sent.items(), found, strict=True):
            came[name] = flat.to(value.dtype)
            if value.dim() > 1:
                lengths = self._lengths(name, value.dim(), self._arriving)
                came[name] = _laid_out(name, came[name], lengths, value.shape[2:])
        return came

    def home(self, made: Collected, on_the_way: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Send numbers per token back to the ranks that generated the rows. A collective if any row moved.

        Args:
            made: the numbers of this rank's bins.
            on_the_way: their type between several ranks, the same on all (a rank may have made none).

        Returns:
            the numbers of the rows that were generated here, ``[n, T]``, 0 where no bin held the row; and bool ``[n,
                1]``: whether a bin did.
        """
        dtype = on_the_way
        if made and self._ranks == 1:
            dtype = made[0][1].dtype
        found = torch.zeros(self._shape, dtype=dtype, device=self._device)
        done = torch.zeros(self._shape[0], 1, dtype=torch.bool, device=self._device)
        away: dict[int, Tensor] = {}
        own_rows = range(self._first, self._first + self._shape[0])
        for rows, values in made:
            stay = [place for place, row in enumerate(rows) if row in own_rows]
            own = [rows[place] - self._first for place in stay]
            width = min(values.size(1), self._shape[1])
            found[own, :width] = values[stay, :width].to(dtype)
            done[own] = True
            away |= {row: values[place] for place, row in enumerate(rows) if row not in own_rows}
        if self._moves:
            own = (self._leaving.rows - self._first).tolist()
            guests = self._arriving.rows
            lengths = self._completions[self._arriving.rows]
            parts = [away[row][:length] for row, length in zip(guests.tolist(), lengths.tolist(), strict=True)]
            column = torch.cat([torch.empty(0, device=self._device), *parts]).to(dtype)
            wanted = self._completions[self._leaving.rows]
            (flat,) = self._exchanged([(column, lengths)], self._arriving.homes, [(dtype, wanted)], self._leaving.ranks)
            found[own] = fitted("", _laid_out("", flat, wanted, ()), self._shape[1])
            done[own] = True
        return found, done

    def _exchanged(
        self, sent: list[tuple[Tensor, Ints]], to: Ints, expected: list[tuple[torch.dtype, Ints]], origins: Ints
    ) -> list[Tensor]:
        """Swap fields of this rank's leaving rows for those of arriving rows. A collective.

        Args:
            sent: for each field its values, 1-D in the order of the rows, and how many numbers each row has.
            to: the rank that each leaving row goes to, ascending.
            expected: for each arriving field its type, and how many numbers each row has.
            origins: the rank that each arriving row comes from, ascending.
        """
        leaving = _bytes([(values.element_size(), lengths) for values, lengths in sent], to, self._ranks)
        arriving = _bytes([(kind.itemsize, lengths) for kind, lengths in expected], origins, self._ranks)
        pieces = [
            values.contiguous().view(torch.uint8).split(sizes.tolist())
            for (values, _), sizes in zip(sent, leaving, strict=True)
        ]
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        message = torch.cat([nothing, *(part for rank in zip(*pieces, strict=True) for part in rank if part.numel())])
        received = torch.empty(int(arriving.sum()), dtype=torch.uint8, device=self._device)
        with named_place("exchange of rows"):
            into = arriving.sum(0).tolist()
            out = leaving.sum(0).tolist()
            torch.distributed.all_to_all_single(received, message, into, out)
        del pieces, message
        self.bytes_received += received.numel()
        ends = arriving.T.cumsum().reshape(self._ranks, len(expected)).T  # a message holds its fields one after another
        found = []
        for (kind, _), sizes, last in zip(expected, arriving.tolist(), ends.tolist(), strict=True):
            parts = [received[end - size : end] for size, end in zip(sizes, last, strict=True) if size]
            found.append(torch.cat([nothing, *parts]).view(kind))
        return found


def _bytes(fields: list[tuple[int, Ints]], ranks: Ints, num_ranks: int) -> Ints:
    """Return ``[fields, num_ranks]``: bytes of each field in the message of each rank."""
    found = np.zeros((len(fields), num_ranks), dtype=np.int64)
    for place, (size, lengths) in enumerate(fields):
        np.add.at(found[place], ranks, lengths * size)
    return found


def _within(lengths: Ints, width: int, device: Any, on_the_right: bool) -> Tensor:
    """Return bool ``[rows, width]``: True at the first ``lengths`` places of each row, or at the last if
    ``on_the_right``."""
    size = torch.as_tensor(lengths, device=device).unsqueeze(1)
    steps = torch.arange(width, device=device)
    if on_the_right:
        return steps >= width - size
    return steps < size


def _laid_out(name: str, flat: Tensor, lengths: Ints, further: tuple[int, ...]) -> Tensor:
    """Return ``[rows, longest, …]`` from the numbers of all rows, which are given one row after the other.

    Args:
        name: the field, which decides on which side it is padded and with what.
        flat: the numbers of all rows.
        lengths: how many places each row fills.
        further: shape of one place.
    """
    width = 0
    if lengths.size:
        width = int(lengths.max())
    keep = _within(lengths, width, flat.device, is_of_prompt(name)).reshape(len(lengths), width, *(1 for _ in further))
    shape = (len(lengths), width, *further)
    return torch.full(shape, FILL.get(name, 0), dtype=flat.dtype, device=flat.device).masked_scatter(keep, flat)
