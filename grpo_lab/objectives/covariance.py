"""Clip-Cov and KL-Cov: the few tokens whose log-prob and advantage go most together are held back, since they are what
makes entropy fall.

Both choose among the tokens of the whole micro-batch, over all ranks (``objectives.Selecting``), by their part of the
covariance, (Â_t − mean Â) · (log π_t − mean log π).

Source: arXiv 2505.22617, section 4.2, and the authors' code. There a micro-batch is one rank's. Their code draws
Clip-Cov's tokens with ``torch.randperm``; here a token's number in the draw is a hash of its completion's tokens, its
place in it and its advantage. So no random state moves, and a choice does not depend on how rows are cut into bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch, safe
from grpo_lab.objectives.clipped import Clipped, LiteralRow
from grpo_lab.objectives.objective import Gather


def covariance(batch: TokenBatch, gather: Gather) -> tuple[Tensor, int]:
    """Return each token's part of the covariance, ``[B, T]``, and the number of tokens over all ranks."""
    logps = batch.logps.detach()
    advantages = batch.advantages.expand(batch.mask.shape)
    all_logps = gather(logps[batch.mask])
    all_advantages = gather(advantages[batch.mask])
    found = (advantages - all_advantages.mean()) * (safe(logps, batch.mask) - all_logps.mean())
    return found, all_logps.numel()


def draw(batch: TokenBatch) -> Tensor:
    """Return a number for each token, long ``[B, T]``: its place in a draw. Tokens of equal completions with equal
    advantages share theirs. Where the batch holds no token ids (a toy), they count as 0."""
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
    """Return the ``count`` eligible tokens of highest score over all ranks, bool ``[B, T]``; of equal scores those that
    the draw has first. Tokens that are equal in both are chosen together."""
    scores = gather(score[eligible])
    drawn = gather(places[eligible])
    if scores.numel() <= count:
        return eligible
    order = drawn.argsort()
    last = order[scores[order].argsort(descending=True, stable=True)][count - 1]
    tied = (score == scores[last]) & (places <= drawn[last])
    return eligible & ((score > scores[last]) | tied)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"`objective.share` is {share}; it must be a fraction of the tokens, above 0 and up to 1")


@dataclass(frozen=True)
class ClipCov:
    """loss_t = 0 for the chosen tokens, else PPO's clipped loss.

    Chosen are max(1, ⌊share · tokens⌋), drawn from the tokens with a covariance between ``cov_low`` and ``cov_high``
    that the clip does not hold.

    Source: Clip-Cov (arXiv 2505.22617, eq. 11–12, with the constants of its code). The paper's equation has no clip;
    its code has PPO's, and so do we.

    Args:
        epsilon: clip width downwards, a fraction.
        epsilon_high: clip width upwards; ``None`` means equal to ``epsilon``.
        share: of all tokens, which are drawn.
        cov_low: covariance above which a token may be drawn, nats times the unit of the advantage.
        cov_high: covariance below which it may be.
    """

    epsilon: float = Clipped.epsilon
    epsilon_high: float | None = None
    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    selection: ClassVar[str] = "clip_cov"

    def __post_init__(self) -> None:
        _ = self.clip
        _check_share(self.share)
        if not self.cov_low < self.cov_high:
            seen = f"`objective.cov_low` is {self.cov_low} and `objective.cov_high` is {self.cov_high}"
            raise ValueError(f"{seen}; the first must be below the second")

    @property
    def clip(self) -> Clipped:
        return Clipped(self.epsilon, self.epsilon_high)

    def select(self, batch: TokenBatch, gather: Gather) -> Tensor:
        """Return bool ``[B, T]``, the tokens of this micro-batch that get no gradient."""
        covariances, tokens = covariance(batch, gather)
        within = (covariances > self.cov_low) & (covariances < self.cov_high)
        held = self.clip.diagnostics(batch)["clip_ratio/region_mean"]
        count = max(1, int(self.share * tokens))
        return first(torch.zeros_like(covariances), within & batch.mask & ~held, count, draw(batch), gather)

    def __call__(self, batch: TokenBatch) -> Tensor:
        return self.clip(batch).masked_fill(batch.chosen[self.selection], 0.0)

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return for the log what PPO's clip cuts off."""
        return self.clip.diagnostics(batch)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        if row.chosen[self.selection][t]:
            return 0.0
        return self.clip.literal(row, t)


@dataclass(frozen=True)
class KLCov:
    """loss_t = −ρ_t · Â + coefficient · |log π(y_t) − log π_old(y_t)| · [t is chosen].

    Chosen are the max(1, ⌊share · tokens⌋) tokens of highest covariance. Until the policy has moved the second term is
    0, and so is its gradient.

    Source: KL-Cov (arXiv 2505.22617, eq. 13–14, with the constants of its code: a share of 2·10⁻³ for 7B and 2·10⁻⁴ for
    32B, coefficient 1). No clip, as there. The second term of eq. 14 is KL(π_old‖π); its Listing 1 and its code have
    the absolute value.

    A chosen token may have Â = 0 (where the mean advantage is not 0), so no row may be left out.

    Args:
        share: of all tokens, which are chosen.
        coefficient: ≥ 0, per nat.
    """

    share: float = 2e-3
    coefficient: float = 1.0

    selection: ClassVar[str] = "kl_cov"
    #: |log π − log π_old| is 0 until the policy has moved
    idle_on_policy: ClassVar[tuple[str, ...]] = ("share", "coefficient")

    def __post_init__(self) -> None:
        _check_share(self.share)
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"`objective.coefficient` is {self.coefficient}; it must be a finite number ≥ 0")

    def select(self, batch: TokenBatch, gather: Gather) -> Tensor:
        """Return bool ``[B, T]``, the tokens of this micro-batch that are pulled back."""
        covariances, tokens = covariance(batch, gather)
        count = max(1, int(self.share * tokens))
        return first(covariances, batch.mask, count, draw(batch), gather)

    def __call__(self, batch: TokenBatch) -> Tensor:
        moved = safe(batch.logps - batch.proximal_logps, batch.mask)
        pulled = moved.abs().masked_fill(~batch.chosen[self.selection], 0.0)
        return -batch.ratio * batch.advantages + self.coefficient * pulled

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` with plain floats."""
        push = -math.exp(row.log_ratios[t]) * row.advantage
        if not row.chosen[self.selection][t]:
            return push
        return push + self.coefficient * abs(row.logps[t] - row.proximal_logps[t])
