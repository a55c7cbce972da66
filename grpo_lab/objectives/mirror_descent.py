"""Kimi k1.5's policy mirror descent: push by reward, pull back by the square of the whole response's log-ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.batch import TokenBatch, masked_sum, safe
from grpo_lab.objectives.literal import LiteralRow


@dataclass(frozen=True)
class MirrorDescent:
    """Kimi k1.5's loss: REINFORCE, plus a penalty on the square of the whole response's log-ratio R.

        loss_t = −Â · log π(y_t) + (τ/2) · R · (log π(y_t) − log π_i(y_t)),    R = Σ_s (log π(y_s) − log π_i(y_s))

    Summed over the tokens of a response y this is −Â·log π(y) + (τ/2)·R², with gradient −Â·∇log π(y) + (τ/2)·∇R². Â = r
    − r̄ within the group (r̄ stands for τ·log Z): no standard deviation, no clipping. π_i (``proximal_logps``) is the
    policy before the first update on the responses, so the reference becomes the current policy with every generation
    batch. If an older policy sampled them, the sampler correction accounts for that.

    Source: Kimi k1.5 (arXiv 2501.12599, section 2.3.2, eq. 3). The paper leaves three things open. Our choices: τ =
    0.1; the mean over the responses of the step (``sequence_sum``); a sampler correction of the whole response
    multiplies both terms.

    The penalty also acts on responses whose advantage is 0, so no row may be left out of the update. With a single
    update per generation batch R = 0, and the loss is −Â·log π(y), whatever τ.

    Args:
        tau: τ ≥ 0, per nat.
    """

    tau: float = 0.1

    #: reads log π and log π_i of whole responses itself: the importance ratio's level has no effect
    reads_ratio: ClassVar[bool] = False
    #: R is of the whole response: a sampler weight per token would weigh parts of it apart
    whole_response: ClassVar[bool] = True
    #: R = 0 until the policy has moved
    idle_on_policy: ClassVar[tuple[str, ...]] = ("tau",)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tau) and self.tau >= 0):
            raise ValueError(f"`objective.tau` is {self.tau}; it must be a finite number ≥ 0")

    def __call__(self, batch: TokenBatch) -> Tensor:
        moved = safe(batch.logps - batch.proximal_logps, batch.mask)
        response = masked_sum(moved, batch.mask, dim=-1).unsqueeze(-1)
        return -batch.advantages * batch.logps + 0.5 * self.tau * response * moved

    def literal(self, row: LiteralRow, t: int) -> float:
        """Compute the loss of token ``t`` in plain floats, for the start-up proof."""
        moved = [new - old for new, old in zip(row.logps, row.proximal_logps, strict=True)]
        return -row.advantage * row.logps[t] + self.tau / 2 * sum(moved) * moved[t]
