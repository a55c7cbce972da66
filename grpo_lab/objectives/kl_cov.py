"""KL-Cov: the tokens of highest covariance between log-prob and advantage are pulled back to the old policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.batch import TokenBatch, safe
from grpo_lab.objectives.covariance import check_share, covariance, draw, first
from grpo_lab.objectives.literal import LiteralRow
from grpo_lab.objectives.objective import Gather


@dataclass(frozen=True)
class KLCov:
    """The plain importance-weighted loss, plus a penalty on a few chosen tokens that pulls them back to the old policy:

        loss_t = −ρ_t · Â + coefficient · |log π(y_t) − log π_old(y_t)| · [t is chosen]

    The chosen tokens are the max(1, ⌊share · tokens⌋) of highest covariance (``covariance``). Until the policy has
    moved, the penalty and its gradient are 0.

    Source: KL-Cov (arXiv 2505.22617, eq. 13–14, with the constants of its code: a share of 2·10⁻³ for 7B and 2·10⁻⁴ for
    32B, coefficient 1). No clip, as there. The second term of eq. 14 is KL(π_old‖π); its Listing 1 and its code have
    the absolute value.

    A chosen token may have Â = 0 (where the mean advantage is not 0), so no row may be left out.

    Args:
        share: number of chosen tokens, as a fraction of all loss tokens.
        coefficient: weight of the penalty per nat, ≥ 0.
    """

    share: float = 2e-3
    coefficient: float = 1.0

    selection: ClassVar[str] = "kl_cov"
    #: the penalty is 0 until the policy has moved
    idle_on_policy: ClassVar[tuple[str, ...]] = ("share", "coefficient")

    def __post_init__(self) -> None:
        check_share(self.share)
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"`objective.coefficient` is {self.coefficient}; it must be a finite number ≥ 0")

    def select(self, batch: TokenBatch, gather: Gather) -> Tensor:
        """Return bool ``[B, T]``: the tokens of this micro-batch that are pulled back."""
        covariances, tokens = covariance(batch, gather)
        count = max(1, int(self.share * tokens))
        return first(covariances, batch.mask, count, draw(batch), gather)

    def __call__(self, batch: TokenBatch) -> Tensor:
        moved = safe(batch.logps - batch.proximal_logps, batch.mask)
        pulled = moved.abs().masked_fill(~batch.chosen[self.selection], 0.0)
        return -batch.ratio * batch.advantages + self.coefficient * pulled

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        push = -math.exp(row.log_ratios[t]) * row.advantage
        if not row.chosen[self.selection][t]:
            return push
        return push + self.coefficient * abs(row.logps[t] - row.proximal_logps[t])
