"""Surrogates and aggregations beside their origins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_lab.objectives import Clipped, DetachedWeight
from origins import verl
from origins.frame import Pairs, Row, ours, same, tensors

Theirs = Callable[..., Any]


def clipped_with_delta(theirs: Theirs, seed: int) -> Pairs:
    batch = tensors(seed)
    how = verl.config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=2.0)
    advantages = batch.advantages.expand_as(batch.logps)
    loss, _ = theirs(batch.proximal_logps, batch.logps, advantages, batch.mask, "token-mean", how)
    yield from same(loss, batch, ours(batch, Clipped(0.2, 0.28, 2.0), "token_mean"))


def cispo(theirs: Theirs, seed: int) -> Pairs:
    batch = tensors(seed)
    how = verl.config(clip_ratio_low=1.0, clip_ratio_high=0.4)
    advantages = batch.advantages.expand_as(batch.logps)
    loss, _ = theirs(batch.proximal_logps, batch.logps, advantages, batch.mask, "token-mean", how)
    yield from same(loss, batch, ours(batch, DetachedWeight(1.4), "token_mean"))


ROWS = [
    Row(
        "clipped",
        verl.loss("compute_policy_loss_vanilla"),
        clipped_with_delta,
        "with delta = clip_ratio_c, token mean",
    ),
    Row("cispo", verl.loss("compute_policy_loss_cispo"), cispo, "their lower bound at 0, token mean"),
]
