"""How far apart two computations of the same number may be: from the precision, the size of the terms and the number of
additions.

Never from what one machine printed: another CPU adds in another order (vector width, blocking), so the bounds hold for
any order. ``u`` is the unit roundoff, half the distance from 1 to the next number (float32: 6e-8, bfloat16: 3.9e-3,
float64: 1.1e-16).
"""

from __future__ import annotations

import math

import torch

#: roundings between a model's weights and a logit that are not part of a long sum: norms, rotary angles, softmax,
#: activation and residuals of two layers, the head, and the log-softmax itself
ROUNDINGS = 16
#: a random error's size that is not exceeded in some thousand draws, in standard deviations
TAIL = 4.0


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def two_walks(dtype: torch.dtype, roundings: float) -> float:
    """Relative difference of two results with ``roundings`` roundings each: a rounding is uniform in ±u (standard
    deviation u/√3), they add up as a random walk, and two results differ by √2 of one's error."""
    return TAIL * unit_roundoff(dtype) * math.sqrt(2 / 3 * max(roundings, 1))


def sum_gap(dtype: torch.dtype, terms: float, additions: int) -> float:
    """Two sums of the same ``additions`` terms in two orders; ``terms``: Σ|term|, which bounds what is added up so
    far."""
    return terms * two_walks(dtype, additions)


def log_prob_gap(dtype: torch.dtype, nats: float, width: int) -> float:
    """A log-prob of size ``nats`` from two forwards of other shapes, absolute.

    A logit is a sum of ``width`` products of hidden states that have ``ROUNDINGS`` roundings of their own behind them.
    """
    return nats * two_walks(dtype, width + ROUNDINGS)


def loss_gap(
    dtype: torch.dtype, terms: float, additions: int, nats: float = 6.0, width: int = 32, steps: int = 1
) -> float:
    """The loss of a step, absolute: a mean of terms of size ``terms`` whose ratios are off by ``log_prob_gap``.

    A ratio e^x is off by its exponent's error, relative to itself. The errors of a step's log-probs share their
    weights, so they are not averaged away over tokens. From the second step on the weights themselves differ by
    rounding: ``steps`` of those errors, as a random walk.
    """
    return terms * log_prob_gap(dtype, nats, width) * math.sqrt(steps) + sum_gap(dtype, terms, additions)


def movement_gap(
    dtype: torch.dtype, weights: float, moved: float, steps: int, nats: float = 6.0, width: int = 32
) -> float:
    """‖Δw − Δw'‖ / ‖Δw'‖ after ``steps`` optimizer steps.

    Two parts. A weight holds its movement only to u of the weight: a rounding a step of ‖w‖ = ``weights``, relative to
    ‖Δw‖ = ``moved``. And a step's gradient is off by what its log-probs are off, and by what the steps before left:
    √Σ_{k ≤ steps} k².
    """
    held = weights / moved * two_walks(dtype, steps)
    return held + log_prob_gap(dtype, nats, width) * math.sqrt(steps * (steps + 1) * (2 * steps + 1) / 6)


def metric_gap(
    dtype: torch.dtype, steps: int, additions: int = 0, size: float = 1.0, nats: float = 6.0, width: int = 32
) -> float:
    """A logged mean (loss, entropy, gradient norm, KL) of terms of size ``size``, relative to that size.

    Step k's gradient is off by its own log-probs' error and by what the k − 1 steps before left (``movement_gap``): at
    most ``steps`` errors. On top of that a sum over ``additions`` numbers.
    """
    return size * (steps * log_prob_gap(dtype, nats, width) + two_walks(dtype, additions))


__all__ = ["log_prob_gap", "loss_gap", "metric_gap", "movement_gap", "sum_gap", "two_walks", "unit_roundoff"]
