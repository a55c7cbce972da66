"""Ragged numbers of rows from rank to rank: one message of bytes for each pair of ranks, whatever the types and widths.

Both ends know which rows travel and how many numbers of each, so a message has no header. gloo and NCCL alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Column:
    """One field of the rows that are sent: ``values`` 1-D, ``lengths`` ``[rows]`` numbers of each row, in the order of the rows."""

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


__all__ = ["Column", "Expected", "swap"]
