"""A completion as plain numbers: what a formula written out over single floats reads.

The start-up proof compares the loss in force with such a formula. A surrogate brings its own as a method
``literal(row, t) -> float``, an aggregation class as ``literal(rows, denominators) -> float``; each counts only for the very class
that defines it (a subclass that changes the tensors would not be what its parent wrote out). Without one nothing is compared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LiteralRow:
    """The tokens of one completion that carry loss, in order.

    Args:
        logps, old_logps: log-probs in nats, one a token.
        log_ratios: log of the importance ratio at the objective's level, one a token.
        advantage: of the completion.
    """

    logps: list[float]
    old_logps: list[float]
    log_ratios: list[float]
    advantage: float


__all__ = ["LiteralRow"]
