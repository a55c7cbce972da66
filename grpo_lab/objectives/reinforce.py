"""REINFORCE: the score function times the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives.clipped import LiteralRow


@dataclass(frozen=True)
class Reinforce:
    """loss_t = −Â · log π(y_t).

    Source: Williams 1992; CS336 lecture 17 ("naive"). No ratio: correct only while the data are on-policy, so with
    ``num_iterations`` > 1 the later passes are biased (that is the method, not a bug of it).
    """

    #: no importance ratio, hence no level of one
    reads_ratio: ClassVar[bool] = False

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.logps

    def literal(self, row: LiteralRow, t: int) -> float:
        """The formula over single floats."""
        return -row.advantage * row.logps[t]
