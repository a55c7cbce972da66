"""The choice of Clip-Cov and KL-Cov: the few tokens whose log-prob and advantage go most together, which are what makes
entropy fall.

Both objectives choose among the tokens of the whole micro-batch, over all ranks (``objectives.Selecting``). They
compare each token's contribution to the covariance, (Â_t − mean Â) · (log π_t − mean log π). ``covariance`` computes
it, ``draw`` gives each token its place in a random order, and ``first`` takes the highest scores, with equal ones in
that order.

Source: arXiv 2505.22617, section 4.2, and the authors' code, in which a micro-batch is one rank's and Clip-Cov's tokens
are drawn with ``torch.randperm``. Here a token's place in the random order is a hash of its completion's tokens, its
position and its advantage. So no random state moves, and a choice does not depend on how rows are cut into bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, safe
from grpo_lab.objectives.objective import Gather


def covariance(batch: TokenBatch, gather: Gather) -> tuple[Tensor, int]:
    """Return each token's contribution to the covariance of advantage and log-prob, ``[B, T]``, and the number of loss
    tokens over all ranks."""
    logps = batch.logps.detach()
    advantages = batch.advantages.expand(batch.mask.shape)
    all_logps = gather(logps[batch.mask])
    all_advantages = gather(advantages[batch.mask])
    found = (advantages - all_advantages.mean()) * (safe(logps, batch.mask) - all_logps.mean())
    return found, all_logps.numel()


def draw(batch: TokenBatch) -> Tensor:
    """Return each token's place in a random order, long ``[B, T]``: a hash of the completion's tokens, the position and
    the advantage.

    Tokens at one position of equal completions with equal advantages share a place. Where the batch holds no token ids
    (a toy batch), the ids count as 0.
    """
    ids = batch.token_ids
    if ids is None:
        ids = torch.zeros_like(batch.mask, dtype=torch.long)
    factors = torch.full_like(ids[0], 6364136223846793005).cumprod(0)
    row = safe((ids + 1) * factors, batch.mask, 0).sum(1, keepdim=True)
    bits = batch.advantages.float().contiguous().view(torch.int32).long()
    place = torch.arange(1, ids.size(1) + 1, device=ids.device)
    number = row + 6364136223846793005 * bits + 1442695040888963407 * place
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # splitmix64
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * factor
    return number ^ ((number >> 31) & (2**33 - 1))


def first(score: Tensor, eligible: Tensor, count: int, places: Tensor, gather: Gather) -> Tensor:
    """Return bool ``[B, T]``: the ``count`` eligible tokens of highest score over all ranks.

    Args:
        score: ``[B, T]``.
        eligible: bool ``[B, T]``, the tokens to choose from. All of them are chosen if they are no more than ``count``.
        count: how many tokens to choose.
        places: long ``[B, T]``, the order among equal scores (``draw``). Tokens that are equal in both are chosen
            together.
        gather: returns values of all ranks.
    """
    scores = gather(score[eligible])
    drawn = gather(places[eligible])
    if scores.numel() <= count:
        return eligible
    order = drawn.argsort()
    last = order[scores[order].argsort(descending=True, stable=True)][count - 1]
    tied = (score == scores[last]) & (places <= drawn[last])
    return eligible & ((score > scores[last]) | tied)


def check_share(share: float) -> None:
    """Raise ValueError unless ``share`` is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ValueError(f"`objective.share` is {share}; it must be a fraction of the tokens, above 0 and up to 1")
