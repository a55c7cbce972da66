"""Plain numbers of one completion, which a formula over single floats reads.

At start-up the loss in force is compared with such a formula (``trainer.exactness.loss_proof``). A surrogate brings its
formula as a method ``literal(row, t) -> float``, an aggregation class as ``literal(rows, denominators) -> float``. A
formula counts only for the very class that defines it, since a subclass may change the tensor code. A part without a
formula is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_lab.batch import earlier_name


@earlier_name("old_logps", "proximal_logps")
@dataclass(frozen=True)
class LiteralRow:
    """A completion as plain floats. Each list has one entry per token that carries loss, in order.

    Args:
        logps: log-probs of the policy in training, nats.
        proximal_logps: log-probs of the policy at the start of the batch's updates, the ratio's denominator.
        log_ratios: log of the importance ratio at the objective's level.
        advantage: advantage of the completion.
        sampler_logps: log-probs with which the tokens were sampled.
        chosen: name of a selection → for each token whether it was chosen (``objectives.Selecting``).
    """

    logps: list[float]
    proximal_logps: list[float]
    log_ratios: list[float]
    advantage: float
    sampler_logps: list[float] = field(default_factory=list)
    chosen: Mapping[str, list[bool]] = field(default_factory=dict)
