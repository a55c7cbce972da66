"""Layout of a packed row: its groups, and its sequences one after another.

A sequence is a run of places: a prompt, or a completion that begins with its head (see ``shared_attention``). All that
an attention has to know of a row follows from where each begins, how long it is and which prompt belongs to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


def sent(laid_out: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the host to the device; nobody waits for the copy."""
    if device.type == "cuda":  # what is not pinned is copied while the host waits
        laid_out = laid_out.pin_memory()
    return laid_out.to(device, non_blocking=True)


@dataclass(frozen=True)
class PackedGroup:
    """Places of a prompt in the packed row, and of each of its completions, head included."""

    prompt: Ints
    completions: list[Ints]


@dataclass(frozen=True)
class Spans:
    """The n sequences of a packed row in its order; together they are all of its tokens. Long ``[n]`` each.

    Attributes:
        start, size: the sequence's tokens are ``[start, start + size)``.
        prompt, prompt_size: a completion sees all of its prompt ``[prompt, prompt + prompt_size)``; for a prompt the
            size is 0.
        head: 1 for a completion, whose first token's key nobody sees; 0 for a prompt.
        group: number of its group, from 1 on.
    """

    start: Ints
    size: Ints
    prompt: Ints
    prompt_size: Ints
    head: Ints
    group: Ints

    @staticmethod
    def of(groups: list[PackedGroup]) -> Spans:
        rows = []
        for number, group in enumerate(groups, 1):
            prompt = int(group.prompt[0])
            rows.append((prompt, group.prompt.size, prompt, 0, 0, number))
            rows += [(int(own[0]), own.size, prompt, group.prompt.size, 1, number) for own in group.completions]
        return Spans(*np.asarray(rows, dtype=np.int64).T)

    @property
    def keys(self) -> Ints:
        """Long ``[n]``: how many keys the last token of each sequence sees."""
        return self.prompt_size + self.size - self.head
