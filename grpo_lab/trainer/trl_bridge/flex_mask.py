"""FlexAttention on packed rows: a block mask made on the host, few different lengths, and a limit to what it compiles.

FlexAttention compiles its kernel for each length of a row, and for the code of the mask's function. So rows are padded
to one of few lengths (``on_ladder``), and the mask's function is the same for all rows: it reads from a table to which
group and completion a token belongs. The kernel also needs to know which blocks of 128 × 128 pairs hold a visible pair,
and which only visible ones. ``block_mask`` computes that from where the sequences begin and end: no function is
evaluated at every pair, and nothing is compiled to make a mask. ``CompileClock`` limits what is compiled all the same.

A token of padding attends to itself alone, and nobody attends to it. Its output is finite, is not scored, and has no
gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flex_attention import flex_attention_forward

from grpo_lab.trainer.trl_bridge.packed_layout import Ints, Spans, sent

#: Number of tokens in a block, FlexAttention's default.
BLOCK = 128
#: Number of lengths in an octave. Up to twice as many blocks every number of blocks is a length; above that every 2nd,
#: 4th, … is one.
RUNGS = 16
#: A call of attention that takes the host at least so many seconds must have compiled; others take a millisecond.
COMPILES = 1.0
#: Limits of compilation, in seconds and in number. Once one is reached, rows are read in tiles (``sdpa``). After 8
#: compilations of one function torch compiles no more, and computes all pairs without a kernel.
SECONDS = 120.0
COMPILATIONS = 6

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class CompileClock:
    """Counts what FlexAttention has compiled in this process: calls that took the host longer than ``COMPILES``."""

    seconds: float = 0.0
    compilations: int = 0
    now: Callable[[], float] = field(default=time.perf_counter, repr=False)

    def timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``call(*args, **options)``, and count it as a compilation if it took long enough."""
        begun = self.now()
        made = call(*args, **options)
        taken = self.now() - begun
        if taken >= COMPILES:
            self.seconds += taken
            self.compilations += 1
        return made

    @property
    def is_spent(self) -> bool:
        """Whether a limit of compilation is reached."""
        return self.seconds >= SECONDS or self.compilations >= COMPILATIONS

    def described(self) -> str:
        return f"{self.compilations} compilations, {self.seconds:.0f} s (allowed: {COMPILATIONS}, {SECONDS:.0f} s)"


#: The process's clock: compiled code and torch's own limit belong to the process, too.
CLOCK = CompileClock()


def on_ladder(length: int) -> int:
    """Return the length in tokens that a row of ``length`` tokens is padded to: a whole number of blocks, of which few
    numbers are allowed (``RUNGS``). It is two blocks at least, since torch compiles anew for sizes of one."""
    blocks = max(2, -(-length // BLOCK))
    step = 1
    while blocks > 2 * RUNGS * step:
        step *= 2
    return -(-blocks // step) * step * BLOCK


def block_mask(spans: Spans, length: int, device: torch.device) -> BlockMask:
    """Make FlexAttention's mask for a packed row that is padded to ``length`` tokens.

    A token attends to itself and to the earlier tokens of its prompt and of its own completion, but never to a head
    (the copy of the prompt's last token before a completion). A token of padding attends to itself alone. A block of
    the mask is empty, partial or full; only in partial ones the kernel evaluates the mask's function.
    """
    blocks = length // BLOCK
    queries = _overlap(spans.start, spans.size, blocks)
    keys = _overlap(spans.start + spans.head, spans.size - spans.head, blocks)
    keys += _overlap(spans.prompt, spans.prompt_size, blocks)
    pairs = queries.T @ keys  # number of pairs of one sequence; in blocks below the diagonal all are visible
    seen = np.tril(pairs > 0)
    full = np.tril(pairs == BLOCK * BLOCK, -1)
    filled = np.arange(blocks) >= int(spans.start[-1] + spans.size[-1]) // BLOCK
    seen |= np.diag(filled)
    tables = np.stack([seen & ~full, full])
    counts = sent(torch.from_numpy(tables.sum(2, dtype=np.int32)), device)
    places = sent(torch.from_numpy(np.argsort(~tables, axis=2, kind="stable").astype(np.int32)), device)
    partial_count, full_count = counts[:, None, None].contiguous().unbind()
    partial_places, full_places = places[:, None, None].contiguous().unbind()
    table = sent(torch.from_numpy(_table(spans, length)), device)
    return BlockMask.from_kv_blocks(
        partial_count, partial_places, full_count, full_places, BLOCK, _seen_by(table), (length, length)
    )


def flex_attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, **options: Any
) -> tuple[Tensor, None]:
    """Call transformers' own function, ``[1, heads, S, d]`` → ``[1, S, heads, d]``, and count what it compiles."""
    made = CLOCK.timed(flex_attention_forward, module, query, key, value, mask, **options)
    return made[0], None


def _seen_by(table: Tensor) -> Mask:
    """Return the mask's function, which tells from the int ``table`` ``[3, S]`` of `_table` whether a query sees a key.
    Its code is the same for all rows, so it is compiled once."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_it = (table[2, key] == 0) | (table[2, key] == table[2, query])
        return (table[0, query] == table[1, key]) & (key <= query) & of_it

    return seen


def _table(spans: Spans, length: int) -> NDArray[np.int32]:
    """Return int ``[3, length]``. Of each token: its group, the group whose tokens may see it (0: none, for a head),
    and the number of its completion (0: it is of a prompt). A token of padding is alone in a group below 0."""
    table = np.zeros((3, length), dtype=np.int32)
    end = int(spans.start[-1] + spans.size[-1])
    table[:2, :end] = np.repeat(spans.group, spans.size)
    table[2, :end] = np.repeat(np.arange(spans.size.size) * spans.head, spans.size)
    table[1, spans.start[spans.head == 1]] = 0
    table[:2, end:] = -np.arange(1, length - end + 1)
    return table


def _overlap(start: Ints, size: Ints, blocks: int) -> NDArray[np.float32]:
    """Return float ``[n, blocks]``: how many tokens of each run ``[start, start + size)`` are in each block. Products
    of two such numbers are exact in float32."""
    first = np.arange(blocks) * BLOCK
    inside = np.minimum((start + size)[:, None], first + BLOCK) - np.maximum(start[:, None], first)
    return inside.clip(0).astype(np.float32)
