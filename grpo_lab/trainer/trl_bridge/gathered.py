"""Tokens taken from a packed row into the rectangles of attention and back, with backwards that know where each went.

A gather's own backward on a GPU knows nothing of that: it adds by atomics, whose order differs from run to run, or
sorts its places at every call (an embedding's: 0.22 ms on an H200, where adding up in a known order takes 0.06).

`spread`: each token of the row stands once in the rectangles, beside padding. Backward is a gather.
`collected`: the way back. Backward writes each token's gradient to its one place; padding gets none.
`repeated`: a token stands in many places (a prompt's key, once for each completion). Backward adds them up, on a GPU
token by token in the order of their places, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from grpo_lab.trainer.trl_bridge.packed_layout import Ints, sent

#: stands for a token where there is none
PADDING = -1


@dataclass(frozen=True)
class Uses:
    """Long ``places`` ``[K]``: the token at each place, token 0 where there is none. For a GPU long ``order`` and
    ``ends`` ``[S + 1]``: the places of token s, in rising order, are ``order[ends[s] : ends[s + 1]]``. Padding is in no
    order: no gradient reaches what nobody sees."""

    places: Tensor
    order: Tensor | None
    ends: Tensor | None

    @staticmethod
    def of(places: Ints, tokens: int, device: torch.device) -> Uses:
        """``places`` may hold ``PADDING``."""
        if device.type == "cpu":
            return Uses(torch.from_numpy(places.clip(0)), None, None)
        return Uses.in_order(places, tokens, device)

    @staticmethod
    def in_order(places: Ints, tokens: int, device: torch.device) -> Uses:
        padding = int((places == PADDING).sum())
        order = np.argsort(places, kind="stable")[padding:]
        ends = np.zeros(tokens + 1, dtype=np.int64)
        np.cumsum(np.bincount(places[order], minlength=tokens), out=ends[1:])
        return Uses(*(sent(torch.from_numpy(one), device) for one in (places.clip(0), order, ends)))


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


class _Collected(Function):
    @staticmethod
    def forward(ctx: Any, placed: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.places = placed.size(0)
        return placed.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        gradient = gradients[0].new_zeros(ctx.places, gradients[0].size(1))
        return gradient.index_copy_(0, back, gradients[0]), None


class _Repeated(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, uses: Uses) -> Tensor:
        ctx.uses = uses
        ctx.tokens = tokens.size(0)
        return tokens.index_select(0, uses.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return added_up(gradients[0], ctx.uses, ctx.tokens), None


def spread(tokens: Tensor, places: Tensor, back: Tensor) -> Tensor:
    """``[Q, F]`` of tokens ``[S, F]``: the token at each of Q places. Long ``places`` ``[Q]``; ``back`` ``[S]``: the
    one place of each token whose gradient counts."""
    out: Tensor = _Spread.apply(tokens, places, back)
    return out


def collected(placed: Tensor, back: Tensor) -> Tensor:
    """Tokens ``[S, F]`` of places ``[Q, F]``; ``back`` as for ``spread``."""
    out: Tensor = _Collected.apply(placed, back)
    return out


def repeated(tokens: Tensor, uses: Uses) -> Tensor:
    """``[K, F]`` of tokens ``[S, F]``."""
    out: Tensor = _Repeated.apply(tokens, uses)
    return out


def added_up(gradient: Tensor, uses: Uses, tokens: int) -> Tensor:
    """``[S, F]``: Σ over the places of each token of ``gradient`` ``[K, F]``."""
    if uses.order is None:
        return gradient.new_zeros(tokens, gradient.size(1)).index_add_(0, uses.places, gradient)
    in_order = gradient.index_select(0, uses.order).float()
    # `unsafe`: the ends are not looked at, for which the host would wait
    summed = torch.segment_reduce(in_order, "sum", offsets=uses.ends, axis=0, unsafe=True)
    return summed.to(gradient.dtype)
