"""The only masking arithmetic in the house.

Rule: *select, don't multiply*. ``nan * 0`` is ``nan``, so a masked position must be replaced before it is summed, and
its gradient must be an exact zero. ``torch.where`` gives both, provided that the unselected branch was finite when its
gradient was formed; callers therefore make inputs safe first (see ``safe``), compute, then select here.

Axes: B rows, T completion tokens. A mask is bool ``[B, T]``; values may be ``[B, T]`` or ``[B, 1]`` (broadcast).
"""

from __future__ import annotations

from torch import Tensor


def safe(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``values`` with masked-out positions replaced by ``fill``; shape ``[B, T]``. Use on *inputs*, before exp or log."""
    return values.expand(mask.shape).masked_fill(~mask, fill)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over selected positions (all of them, or along ``dim``). All-masked input gives a differentiable zero."""
    selected = safe(values, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def token_counts(mask: Tensor) -> Tensor:
    """Selected tokens per row, float ``[B]``, at least 1 so that an all-masked row divides to a differentiable zero."""
    return mask.sum(-1).clamp(min=1).float()


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the selected tokens of each row, ``[B]``."""
    return masked_sum(values, mask, dim=-1) / token_counts(mask)
