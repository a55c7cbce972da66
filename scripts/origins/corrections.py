"""Corrections of the sampler beside verl's rollout correction and SkyRL's off-policy correction."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_lab.batch import masked_sum
from grpo_lab.objectives import CORRECTIONS, sampler_log_ratio
from origins.frame import Config, Origin, Pairs, Row, tensors

HELPER = "verl/trainer/ppo/rollout_corr_helper.py"
SKYRL = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """verl's ``masked_mean``, whose file imports more than torch."""
    total = (values * mask).sum(axis) if axis is not None else (values * mask).sum()
    return total / (mask.sum(axis) + 1e-8 if axis is not None else mask.sum() + 1e-8)


STANDS_IN = {
    "math": math,
    "verl_F": SimpleNamespace(masked_mean=masked_mean, masked_sum=lambda values, mask, axis=None: masked_sum(
        values, mask.bool(), axis
    )),
    "compute_is_metrics": lambda **_: {},
    "compute_rs_metrics": lambda **_: {},
}  # fmt: skip
WEIGHTS = Origin(
    "volcengine/verl", HELPER, "compute_rollout_correction_weights", beside=("SAFETY_BOUND",), names=STANDS_IN
)
REJECTION = Origin(
    "volcengine/verl",
    HELPER,
    "compute_rollout_rejection_mask",
    beside=("SAFETY_BOUND", "_parse_rollout_rs_thresholds"),
    names={**STANDS_IN, "SUPPORTED_ROLLOUT_RS_OPTIONS": {"token_k1", "seq_mean_k1", "seq_mean_k3"},
           "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": {"token_k1"}},
)  # fmt: skip


def skyrl(function: str) -> Origin:
    def safe_exp_delta(delta: Tensor, clip: float, out_dtype: torch.dtype) -> Tensor:
        return delta.clamp(-clip, clip).exp().to(out_dtype)

    names = {"DictConfig": Any, "safe_exp_delta": safe_exp_delta}
    return Origin("NovaSky-AI/SkyRL", SKYRL, function, names=names)


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return proximal and sampler's log-probs, x and mask; the last rows nearly agree, and are kept."""
    batch = tensors(seed)
    near = torch.tensor([1.0, 0.3, 0.1, 0.03, 1e-3, 1e-4], dtype=torch.float64).unsqueeze(1)
    sampler = batch.proximal_logps + near * (batch.sampler_logps - batch.proximal_logps)
    return batch.proximal_logps, sampler, sampler_log_ratio(batch.proximal_logps, sampler, batch.mask), batch.mask


def ours(part: str, x: Tensor, mask: Tensor, **knobs: Any) -> Tensor:
    correction = CORRECTIONS[part](**knobs)
    whole = getattr(correction, "whole_batch", False)
    weights = correction(x, mask, lambda values: values) if whole else correction(x, mask)
    return torch.where(mask, weights.expand(mask.shape), 0.0)


def verls_weights(part: str, level: str, normalised: bool = False, **knobs: Any) -> Callable[..., Pairs]:
    def pairs(function: Callable[..., Any], seed: int) -> Pairs:
        _, _, x, mask = inputs(seed)
        high = knobs.get("high", 2.0)
        theirs = function(x, mask.double(), rollout_is=level, rollout_is_threshold=high,
                          rollout_is_batch_normalize=normalised)[0]  # fmt: skip
        yield theirs * mask, ours(part, x, mask, **knobs)

    return pairs


def verls_rejection(part: str, option: str, threshold: str, times_ratio: bool = False, **knobs: Any) -> Any:
    def pairs(function: Callable[..., Any], seed: int) -> Pairs:
        _, _, x, mask = inputs(seed)
        theirs = function(x, mask.double(), rollout_rs=option, rollout_rs_threshold=threshold)[0]
        yield theirs * (x.exp() if times_ratio else 1.0), ours(part, x, mask, **knobs)

    return pairs


def skyrls_geometric(function: Callable[..., Any], seed: int) -> Pairs:
    old, sampler, x, mask = inputs(seed)
    for low, high in ((0.999, 1.001), (0.97, 1.03)):
        config = Config(geo_mask_low=low, geo_mask_high=high)
        theirs = function(old, sampler, mask.double(), "geometric", config)[0]
        yield theirs * mask, ours("geometric_rejection", x, mask, low=low, high=high)


def skyrls_icepop(function: Callable[..., Any], seed: int) -> Pairs:
    old, sampler, x, mask = inputs(seed)
    config = Config(token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=5.0)
    kept = function(old, sampler, mask.double(), config)[0]
    yield kept * x.exp() * mask, ours("icepop", x, mask)


def skyrls_product(function: Callable[..., Any], seed: int) -> Pairs:
    old, sampler, x, mask = inputs(seed)
    config = Config(product_mask_low=0.0, product_mask_high=3.0)
    kept = function(old, sampler, mask.double(), "product", config)[0]
    yield kept * x.sum(1, keepdim=True).exp() * mask, ours("sequence_mask", x, mask)


INVERSE = "their bounds are of π_sampler/π_proximal: l_u is low 1/u and high 1/l here"
ROWS = [
    Row("tis", WEIGHTS, verls_weights("tis", "token")),
    Row("token_truncate", WEIGHTS, verls_weights("token_truncate", "token", high=3.0)),
    Row("sequence_truncate", WEIGHTS, verls_weights("sequence_truncate", "sequence", high=3.0)),
    Row("batch_normalised", WEIGHTS, verls_weights("batch_normalised", "token", True)),
    Row("batch_normalised (sequence)", WEIGHTS, verls_weights("batch_normalised", "sequence", True, per="sequence")),
    Row("geometric_rejection", REJECTION, verls_rejection(
        "geometric_rejection", "seq_mean_k1", "0.999_1.001", low=1 / 1.001, high=1 / 0.999), INVERSE),
    Row("k3_rejection", REJECTION, verls_rejection("k3_rejection", "seq_mean_k3", "0.01")),
    Row("icepop", REJECTION, verls_rejection("icepop", "token_k1", "0.2_2.0", times_ratio=True), INVERSE),
    Row("geometric_rejection", skyrl("compute_sequence_mask"), skyrls_geometric),
    Row("icepop", skyrl("compute_token_mask"), skyrls_icepop, "their mask times their token ratio, not truncated"),
    Row("sequence_mask", skyrl("compute_sequence_mask"), skyrls_product, "their mask times their product"),
]  # fmt: skip
