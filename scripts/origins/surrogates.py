"""Surrogates and aggregations beside their origins."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import (
    ClipCov,
    Clipped,
    DetachedWeight,
    GeometricMean,
    KLCov,
    KLRegion,
    PrimeRL,
    SoftGate,
    TotalVariationRegion,
)
from origins import skyrl, verl
from origins.frame import Config, Origin, Pairs, Row, gradient, ours, same, tensors

Theirs = Callable[..., Any]


def in_verl(part: Any, averaged: str, ratio: str = "token", per_token: bool = False, **settings: Any) -> Any:
    """Return the pairs of a loss of verl: old log-probs, log-probs, advantages ``[B, T]``, mask."""
    mode = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}[averaged]

    def pairs(theirs: Theirs, seed: int) -> Pairs:
        batch = tensors(seed, per_token=per_token)
        advantages = batch.advantages.expand_as(batch.logps)
        found = theirs(batch.proximal_logps, batch.logps, advantages, batch.mask, mode, verl.config(**settings))
        yield from same(found[0], batch, ours(batch, part, averaged, ratio))

    return pairs


def of_entropy_mechanism(part: Any, **settings: Any) -> Any:
    """Return the pairs of a loss in the code of arXiv 2505.22617, whose settings are arguments."""

    def pairs(theirs: Theirs, seed: int) -> Pairs:
        batch = tensors(seed)
        advantages = batch.advantages.expand_as(batch.logps).clone()
        found = theirs(batch.proximal_logps, batch.logps, advantages, batch.mask, **settings)
        yield from same(found[0], batch, ours(batch, part, "token_mean"))

    return pairs


def in_skyrl(part: Any, **settings: Any) -> Any:
    """Return the pairs of SkyRL's DPPO, which sums over tokens."""

    def pairs(theirs: Theirs, seed: int) -> Pairs:
        batch = tensors(seed)
        how = Config(dppo=Config(**settings), off_policy_correction=None)
        advantages = batch.advantages.expand_as(batch.logps)
        loss, _ = theirs(
            batch.logps, batch.proximal_logps, advantages, how, batch.mask, rollout_logprobs=batch.sampler_logps
        )
        yield from same(loss / batch.mask.size(0), batch, ours(batch, part, "sequence_sum"))

    return pairs


def in_stable_rl(part: Any, mode: str, **settings: Any) -> Any:
    """Return the pairs of the authors' DPPO: gradients only, since they compute −sg(ρ)·Â·log π."""

    def pairs(theirs: Theirs, seed: int) -> Pairs:
        batch = tensors(seed)
        nothing = torch.zeros_like(batch.logps.detach())
        loss, _ = theirs(
            batch.proximal_logps, batch.logps, batch.advantages.expand_as(batch.logps), batch.mask, "token-mean",
            verl.config(**settings), rollout_log_prob=batch.sampler_logps, topk_kl=nothing, entropy=nothing,
            loss_mode=mode,
        )  # fmt: skip
        yield gradient(loss, batch), ours(batch, part, "token_mean")[1]

    return pairs


def prime_rl(theirs: Theirs, seed: int) -> Pairs:
    batch = tensors(seed)
    how = Config(dppo_mask_low=0.1, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=0.3)
    loss = sum(
        theirs(
            types.SimpleNamespace(
                trainer_logprobs=batch.logps[row],
                inference_logprobs=batch.sampler_logps[row],
                advantages=batch.advantages[row].expand_as(batch.logps[row]),
                loss_mask=batch.mask[row],
                loss_weights=None,
            ),
            how,
        ).loss
        for row in range(batch.mask.size(0))
    )
    yield from same(loss / batch.mask.sum(), batch, ours(batch, PrimeRL(0.1, 0.2, kl_tau=0.3), "token_mean"))


def prompt_mean(theirs: Theirs, seed: int) -> Pairs:
    batch: TokenBatch = tensors(seed)
    groups = [(start, start + 2) for start in range(0, batch.mask.size(0), 2)]
    scaled = theirs(batch.advantages.expand_as(batch.logps), batch.mask, "prompt_mean", 1, batch.mask.size(1), groups)
    loss = -(scaled * batch.logps * batch.mask).sum()
    yield from same(loss, batch, ours(batch, "reinforce", "prompt_mean"))


STABLE = Origin(
    "sail-sg/Stable-RL", verl.PATH, "compute_policy_loss_with_mask",
    ("agg_loss", "_compute_token_mask_for_policy_loss"), verl.NAMES,
)  # fmt: skip
PRIME = Origin(
    "PrimeIntellect-ai/prime-rl", "src/prime_rl/trainer/rl/loss.py", "default_loss_fn",
    ("_safe_mean", "compute_importance_ratio_and_mismatch_kl"), {"LossOutputs": types.SimpleNamespace},
)  # fmt: skip
ENTROPY = "PRIME-RL/Entropy-Mechanism-of-RL"
TV, KL = "dppo_binary_tv", "dppo_binary_kl"
ALL = "all eligible tokens: theirs are drawn at random"

ROWS = [
    Row(
        "clipped",
        verl.loss("compute_policy_loss_vanilla"),
        in_verl(
            Clipped(0.2, 0.28, 2.0), "token_mean", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=2.0
        ),
        "with delta = clip_ratio_c",
    ),
    Row(
        "cispo",
        verl.loss("compute_policy_loss_cispo"),
        in_verl(DetachedWeight(1.4), "token_mean", clip_ratio_low=1.0, clip_ratio_high=0.4),
        "their lower bound at 0",
    ),
    Row(
        "gspo_token",
        verl.loss("compute_policy_loss_gspo"),
        in_verl(Clipped(0.1, 0.2), "sequence_mean", "sequence_token", True, clip_ratio_low=0.1, clip_ratio_high=0.2),
        "an advantage per token",
    ),
    Row(
        "gmpo",
        verl.loss("compute_policy_loss_geo_mean"),
        in_verl(GeometricMean(), "sequence_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
    ),
    Row(
        "sapo",
        verl.loss("compute_policy_loss_sapo"),
        in_verl(SoftGate(1.3, 0.9), "sequence_mean", tau_pos=0.9, tau_neg=1.3),
    ),
    Row(
        "dppo_tv",
        skyrl.loss("dppo_policy_loss"),
        in_skyrl(TotalVariationRegion(0.1, 0.2), dppo_type="binary_tv", delta_low=0.1, delta_high=0.2),
    ),
    Row(
        "dppo_kl",
        skyrl.loss("dppo_policy_loss"),
        in_skyrl(KLRegion(0.02, 0.05), dppo_type="binary_kl", delta_low=0.02, delta_high=0.05),
    ),
    Row(
        "dppo_tv",
        STABLE,
        in_stable_rl(
            TotalVariationRegion(0.1, 0.2, 1.5), TV, clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=1.5
        ),
        "gradients, with truncate = clip_ratio_c",
    ),
    Row(
        "dppo_kl",
        STABLE,
        in_stable_rl(KLRegion(0.02, 0.05, 1.5), KL, clip_ratio_low=0.02, clip_ratio_high=0.05, clip_ratio_c=1.5),
        "gradients, with truncate = clip_ratio_c",
    ),
    Row("prime_rl", PRIME, prime_rl),
    Row(
        "clip_cov",
        verl.loss("compute_policy_loss_clip_cov"),
        in_verl(
            ClipCov(share=1.0, cov_low=0.1), "token_mean",
            policy_loss=Config(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0),
        ),
        ALL,
    ),
    Row(
        "clip_cov",
        verl.loss("compute_policy_loss_clip_cov", repository=ENTROPY),
        of_entropy_mechanism(ClipCov(share=1.0, cov_low=0.1), cliprange=0.2, clip_ratio=1.0, clip_cov_lb=0.1),
        ALL,
    ),
    Row(
        "kl_cov",
        verl.loss("compute_policy_loss_kl_cov"),
        in_verl(KLCov(0.2, 0.7), "token_mean", policy_loss=Config(kl_cov_ratio=0.2, ppo_kl_coef=0.7)),
    ),
    Row(
        "kl_cov",
        verl.loss("compute_policy_loss_kl_cov", repository=ENTROPY),
        of_entropy_mechanism(KLCov(0.2, 0.7), k_percent=20, ppo_kl_coef=0.7),
        "k_percent is 100 shares",
    ),
    Row("prompt_mean", skyrl.loss("apply_loss_reduction_to_advantages_minibatch"), prompt_mean, "of REINFORCE's loss"),
]  # fmt: skip
