"""Corrections of the sampler: weights of the loss where another policy than the proximal one sampled the tokens.

Weights are made from x_t = log π_proximal(y_t) − log π_sampler(y_t) and the ratio ρ_t = e^{x_t}. A token that nobody
sampled, or for which the engine reported no log-prob, has x_t = 0 and ρ_t = 1. No gradient flows through a weight.
``truncation`` holds the corrections that cut a weight off at a bound, ``dropping`` those that set it to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_lab import registry
from grpo_lab.batch import safe
from grpo_lab.objectives.corrections.dropping import GeometricRejection, IcePop, K3Rejection, SequenceMask, TokenMask
from grpo_lab.objectives.corrections.truncation import TIS, BatchNormalised, SequenceTruncate, TokenTruncate

__all__ = [
    "CORRECTIONS", "RESERVED", "TIS", "TRLS_MODES", "BatchNormalised", "Correction", "GeometricRejection", "IcePop",
    "K3Rejection", "SequenceMask", "SequenceTruncate", "TokenMask", "TokenTruncate", "kept", "register_correction",
    "sampler_log_ratio",
]  # fmt: skip

Correction = Callable[..., Tensor]
"""``correction(x [B, T], mask [B, T]) -> weights``, ``[B, T]`` or ``[B, 1]``. The weights of a row depend on that row
alone, and not on its padding.

Further attributes describe a correction; the value in brackets is the default:

``whole_batch`` (False): the weights depend on all rows of the generation batch. The correction is then called once a
batch, as ``correction(x, mask, gather)`` with this rank's rows; ``gather(values)`` returns those of all ranks.
``level`` (none): ``token`` or ``sequence``. One of tokens is refused beside an objective of whole responses.
``keeps(weights)`` (weights != 0): which weights are within the bounds, for the log.
``literal(steps, t)`` (none): the weight of token t in plain floats, from the x of one response, for the start-up proof.
"""


RESERVED = ("name",)
"""Keys of ``correction: {…}`` that cannot be knobs."""


CORRECTIONS: dict[str, Any] = {
    "token_truncate": TokenTruncate,
    "token_mask": TokenMask,
    "sequence_truncate": SequenceTruncate,
    "sequence_mask": SequenceMask,
    "tis": TIS,
    "icepop": IcePop,
    "geometric_rejection": GeometricRejection,
    "k3_rejection": K3Rejection,
    "batch_normalised": BatchNormalised,
}


#: class → TRL's ``vllm_importance_sampling_mode`` that computes the same with the same bounds
TRLS_MODES: dict[type, str] = {
    TokenTruncate: "token_truncate",
    TokenMask: "token_mask",
    SequenceTruncate: "sequence_truncate",
    SequenceMask: "sequence_mask",
    TIS: "token_truncate",
    IcePop: "token_mask",
}


def sampler_log_ratio(proximal_logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> Tensor:
    """Return x_t = log π_proximal(y_t) − log π_sampler(y_t), ``[B, T]``, without gradient; 0 where masked, or where the
    sampler's log-prob is NaN."""
    return safe(proximal_logps.detach() - sampler_logps, mask).nan_to_num(nan=0.0)


def kept(correction: Correction, weights: Tensor) -> Tensor:
    """Return bool of the shape of ``weights``: which of them are within the correction's bounds."""
    keeps: Callable[[Tensor], Tensor] | None = getattr(correction, "keeps", None)
    if keeps is None:
        return weights != 0
    return keeps(weights)


def register_correction(name: str, part: Any = None) -> Any:
    """Register ``part`` under ``name``, so that ``correction: name`` selects it. Also usable as a decorator.

    Args:
        name: the name in recipes.
        part: a function, or a dataclass whose fields are its knobs.

    Raises:
        ValueError: another object has the name already, or the part cannot be called.
    """
    if part is None:
        return lambda later: register_correction(name, later)
    return registry.add(CORRECTIONS, name, part, RESERVED, "correction")
