"""Objectives: how advantages become a loss. Pure torch; tensors ``[B, T]``, log-probs in nats, lengths in tokens.

An ``Objective`` is put together from parts, in this order:

    ratios         log of the importance ratio, per token or per completion
    surrogates     loss per token from ratio, advantage and log-prob: ``clipped``, ``unclipped``, ``trust_region`` …
    gates          weights that leave completions or tokens out of that loss
    corrections    weights for completions that another policy has sampled
    kl             β times an estimate of the KL to the reference, added per token (or charged to the reward)
    aggregation    average over tokens and completions: a scalar
    entropy        bonus, subtracted from the scalar

``presets`` lists the combinations that papers use. ``mixed`` gives each task of a run an objective of its own.
``value_loss`` is the loss of a critic. ``literal`` holds what the start-up proof of the loss reads.
"""

from __future__ import annotations

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.objectives.adaptive_kl import AdaptiveKL
from grpo_lab.objectives.aggregation import (
    AGGREGATIONS,
    Aggregation,
    aggregation,
    fixed_budget,
    local_token_mean,
    prompt_mean,
    register_aggregation,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from grpo_lab.objectives.clip_cov import ClipCov
from grpo_lab.objectives.clipped import Clipped
from grpo_lab.objectives.corrections import (
    CORRECTIONS,
    Correction,
    register_correction,
    sampler_log_ratio,
)
from grpo_lab.objectives.entropy import AdaptiveEntropy, EntropyBonus
from grpo_lab.objectives.gates import OffPolicyMask, TopEntropy, kept_tokens
from grpo_lab.objectives.geometric_mean import GeometricMean
from grpo_lab.objectives.kl import KLTerm
from grpo_lab.objectives.kl_cov import KLCov
from grpo_lab.objectives.kl_estimators import k1, k2, k3
from grpo_lab.objectives.literal import LiteralRow
from grpo_lab.objectives.mirror_descent import MirrorDescent
from grpo_lab.objectives.mixed import MixedObjective, TaskObjective
from grpo_lab.objectives.objective import Gate, Gather, Objective, Selecting, Surrogate
from grpo_lab.objectives.presets import PRESETS, SURROGATES, Preset, is_ours, preset, register_objective, surrogate
from grpo_lab.objectives.ratios import (
    RATIO_LEVELS,
    literal_log_ratios,
    log_ratio,
    sequence_log_ratio,
    token_log_ratio,
)
from grpo_lab.objectives.sapo import SoftGate
from grpo_lab.objectives.trust_region.dppo import KLRegion, TotalVariationRegion
from grpo_lab.objectives.trust_region.prime_rl import PrimeRL
from grpo_lab.objectives.unclipped import DetachedWeight, Reinforce, Unclipped
from grpo_lab.objectives.vespo import GammaWeight

__all__ = [
    "AGGREGATIONS", "CORRECTIONS", "PRESETS", "RATIO_LEVELS", "SURROGATES", "AdaptiveEntropy", "AdaptiveKL",
    "Aggregation", "ClipCov", "Clipped", "Correction", "Denominators", "DetachedWeight", "EntropyBonus", "GammaWeight",
    "Gate", "Gather", "GeometricMean", "KLCov", "KLRegion", "KLTerm", "LiteralRow", "MirrorDescent", "MixedObjective",
    "Objective", "OffPolicyMask", "Preset", "PrimeRL", "Reinforce", "Selecting", "SoftGate", "Surrogate",
    "TaskObjective", "TokenBatch", "TopEntropy", "TotalVariationRegion", "Unclipped", "aggregation", "fixed_budget",
    "is_ours", "k1", "k2", "k3", "kept_tokens", "literal_log_ratios", "local_token_mean", "log_ratio", "preset",
    "prompt_mean", "register_aggregation", "register_correction", "register_objective", "sampler_log_ratio",
    "sequence_log_ratio", "sequence_mean", "sequence_sum", "surrogate", "token_log_ratio", "token_mean",
]  # fmt: skip
