"""Log-probs over the tokens that an engine kept (top-p, top-k, min-p), in the place of TRL's head.

    log π_K(y_t) = z_{y_t} − log Σ_{k ∈ K_t} e^{z_k}        z: logits at the sampling temperature, K_t: the kept tokens

Only logits of kept tokens are needed, so only their rows of the head's weight are multiplied with the hidden states.
The sets were chosen at generation and are constants here: no gradient flows through the choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trl.trainer import utils

from grpo_lab.trainer.trl_bridge.names import replaced

#: Number of scored tokens for which rows of the head's weight are gathered at once; the backward gathers them again.
TILE = 256


def kept_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, kept: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies ``[n]`` of n scored tokens over their sets of kept tokens, in nats.

    Args:
        hidden: ``[n, H]``, the hidden states that score the tokens.
        weight, bias: ``[V, H]`` and ``[V]``, those of the LM head.
        labels: long ``[n]``, the scored tokens; each must be in its set.
        kept: int ``[n, K]``, the sets: token ids + 1, and 0 for no token.
        temperature: the sampling temperature; logits are divided by it.
    """
    there = kept > 0
    ids = (kept - 1).clamp(min=0).long()
    logits = torch.einsum("nh,nkh->nk", hidden, weight[ids])
    if bias is not None:
        logits = logits + bias[ids]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = logits.masked_fill(~there, -torch.inf).log_softmax(dim=1)
    own = (ids == labels.unsqueeze(1)) & there
    chosen = log_probs.masked_fill(~own, 0.0).sum(dim=1)
    finite = log_probs.masked_fill(~there, 0.0)
    return chosen, -(finite.exp() * finite).masked_fill(~there, 0.0).sum(dim=1)


def kept_at(tokens: Tensor | None, take: Tensor, length: int) -> Tensor | None:
    """Move the kept sets ``[n, T, K]`` of completion tokens to the places in their rows that score them, and return
    ``[n, length, K]``. ``take``: long ``[n, T]``, those places. None stays None: no token is left out."""
    if tokens is None:
        return None
    found = tokens.new_zeros(tokens.size(0), length, tokens.size(2))
    # behind its completion a row's `take` repeats its last place with empty sets (0): the largest entry counts
    return found.scatter_reduce(1, take.unsqueeze(2).expand_as(tokens), tokens, "amax")


@contextlib.contextmanager
def over_kept(kept: Tensor) -> Iterator[None]:
    """Let TRL's head, inside the block, score n tokens over the sets ``kept`` ``[n, K]``, in the same order. The
    forward raises ValueError for a model that caps or scales its logits."""

    class OverKept:
        """Stands for the autograd function of TRL's head, whose arguments it takes."""

        @staticmethod
        def apply(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, temperature: float, *rest: Any) -> Any:
            _, softcap, scale, _ = rest
            if softcap is not None or scale not in (None, 1.0):
                raise ValueError(
                    "`top_k`: this model caps or scales its logits, and log-probs among kept tokens do not"
                )
            tiles = zip(hidden.split(TILE), labels.split(TILE), kept.split(TILE), strict=True)
            made = [
                checkpoint(kept_scores, one, weight, bias, scored, within, temperature, use_reentrant=False)
                for one, scored, within in tiles
            ]
            log_probs, entropies = (torch.cat(parts) for parts in zip(*made, strict=True))
            return log_probs, entropies, None, None, None

    with replaced(utils, "_ChunkedLogProbFunction", OverKept):
        yield
