"""Layout of a packed row: its groups, and its sequences one after another.

A packed row is ``[prompt, head 1, completion 1, head 2, completion 2, …]``, group after group, where a head is a copy
of the prompt's last token (see ``shared_attention``). A sequence is a run of places in it: a prompt, or a completion
with its head. Which tokens attend to which follows from where the sequences begin, how long they are and which prompt
they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


def sent(laid_out: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to ``device``, without waiting for the copy."""
    if device.type == "cuda":  # for memory that is not pinned the host would wait
        laid_out = laid_out.pin_memory()
    return laid_out.to(device, non_blocking=True)


@dataclass(frozen=True)
class PackedGroup:
    """One group in a packed row: the places of its prompt's tokens, and of each completion's, head included."""

    prompt: Ints
    completions: list[Ints]


@dataclass(frozen=True)
class Spans:
    """The n sequences of a packed row, in its order; together they cover all of its tokens.

    Attributes (each long ``[n]``):
        start, size: a sequence's tokens are at the places ``[start, start + size)``.
        prompt, prompt_size: the tokens of the prompt before it are at ``[prompt, prompt + prompt_size)``, and a
            completion attends to all of them; for a prompt the size is 0.
        head: 1 for a completion, whose first token nobody attends to; 0 for a prompt.
        group: number of the sequence's group, from 1 on.
    """

    start: Ints
    size: Ints
    prompt: Ints
    prompt_size: Ints
    head: Ints
    group: Ints

    @staticmethod
    def of(groups: list[PackedGroup]) -> Spans:
        """List the sequences of ``groups``, each prompt before its completions."""
        rows = []
        for number, group in enumerate(groups, 1):
            prompt = int(group.prompt[0])
            rows.append((prompt, group.prompt.size, prompt, 0, 0, number))
            rows += [(int(own[0]), own.size, prompt, group.prompt.size, 1, number) for own in group.completions]
        return Spans(*np.asarray(rows, dtype=np.int64).T)

    @property
    def keys(self) -> Ints:
        """Long ``[n]``: number of tokens that the last token of each sequence attends to."""
        return self.prompt_size + self.size - self.head
