"""Clip-Cov: a few tokens of high covariance between log-prob and advantage get no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.clipped import Clipped
from grpo_lab.objectives.covariance import check_share, covariance, draw, first
from grpo_lab.objectives.literal import LiteralRow
from grpo_lab.objectives.objective import Gather


@dataclass(frozen=True)
class ClipCov:
    """PPO's clipped loss, without a few randomly chosen tokens: loss_t = 0 for them, and that of ``Clipped`` for all
    others.

    The chosen tokens are max(1, ⌊share · tokens⌋) of those whose covariance (``covariance``) lies between ``cov_low``
    and ``cov_high`` and that PPO's clip does not hold anyway. If there are fewer, all of them are chosen.

    Source: Clip-Cov (arXiv 2505.22617, eq. 11–12, with the constants of its code). The paper's equation has no clip;
    its code has PPO's, and so do we.

    Args:
        epsilon: clip width downwards, a fraction.
        epsilon_high: clip width upwards; ``None`` means equal to ``epsilon``.
        share: number of chosen tokens, as a fraction of the micro-batch's loss tokens over all ranks.
        cov_low: covariance above which a token may be chosen, nats times the unit of the advantage.
        cov_high: covariance below which a token may be chosen.
    """

    epsilon: float = Clipped.epsilon
    epsilon_high: float | None = None
    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    selection: ClassVar[str] = "clip_cov"

    def __post_init__(self) -> None:
        _ = self.clip
        check_share(self.share)
        if not self.cov_low < self.cov_high:
            seen = f"`objective.cov_low` is {self.cov_low} and `objective.cov_high` is {self.cov_high}"
            raise ValueError(f"{seen}; the first must be below the second")

    @property
    def clip(self) -> Clipped:
        return Clipped(self.epsilon, self.epsilon_high)

    def select(self, batch: TokenBatch, gather: Gather) -> Tensor:
        """Return bool ``[B, T]``: the tokens of this micro-batch that get no gradient."""
        covariances, tokens = covariance(batch, gather)
        within = (covariances > self.cov_low) & (covariances < self.cov_high)
        held = self.clip.diagnostics(batch)["clip_ratio/region_mean"]
        count = max(1, int(self.share * tokens))
        return first(torch.zeros_like(covariances), within & batch.mask & ~held, count, draw(batch), gather)

    def __call__(self, batch: TokenBatch) -> Tensor:
        return self.clip(batch).masked_fill(batch.chosen[self.selection], 0.0)

    def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return for the log which tokens PPO's clip cuts off; the chosen ones are not counted."""
        return self.clip.diagnostics(batch)

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        if row.chosen[self.selection][t]:
            return 0.0
        return self.clip.literal(row, t)
