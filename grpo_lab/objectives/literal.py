"""What a formula over single floats reads: one completion as plain numbers.

At start-up the loss in force is compared with such a formula. A surrogate brings its own as a method ``literal(row, t)
-> float``, an aggregation class as ``literal(rows, denominators) -> float``. Each counts only for the very class that
defines it (a subclass may change the tensors). Without one nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_lab.batch import earlier_name


@earlier_name("old_logps", "proximal_logps")
@dataclass(frozen=True)
class LiteralRow:
    """One completion as plain floats: its tokens that carry loss, in order.

    Args:
        logps: log-probs in nats, one a token.
        proximal_logps: log-probs of the policy at the start of the batch's updates, the ratio's denominator.
        log_ratios: log of the importance ratio at the objective's level, one a token.
        advantage: the completion's.
        sampler_logps: log-probs with which the tokens were sampled.
        chosen: part → which tokens it chose (``objectives.Selecting``).
    """

    logps: list[float]
    proximal_logps: list[float]
    log_ratios: list[float]
    advantage: float
    sampler_logps: list[float] = field(default_factory=list)
    chosen: Mapping[str, list[bool]] = field(default_factory=dict)
