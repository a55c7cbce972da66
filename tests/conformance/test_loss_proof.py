"""The start-up proof accepts every preset and notices what is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.test_preset_rows import KLS, PULLS, objective
from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import AGGREGATIONS, PRESETS, Clipped, DetachedWeight, KLTerm, Objective, Unclipped
from grpo_lab.trainer.exactness.loss_proof import is_sum_over_rows, prove_loss, vanishes_without_advantage


@pytest.mark.parametrize("kl", [*KLS, KLTerm(0.1, "k1"), KLTerm(0.1, "k1", "reward")], ids=str)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_proved(name: str, kl: KLTerm | None) -> None:
    point = objective(name, kl)
    assert "proved on a toy batch" in prove_loss(point.token_loss, point)
    free = (kl is None or kl.placement == "reward") and name not in PULLS
    assert vanishes_without_advantage(point.token_loss, point) is free
    assert is_sum_over_rows(point) is (name != "bnpo")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_flipped_sign_and_a_forgotten_kl_are_noticed(name: str) -> None:
    point = objective(name, KLTerm(0.1, "k3"))
    for wrong in (lambda batch: -point.token_loss(batch), objective(name).token_loss):
        with pytest.raises(RuntimeError, match="not the configured objective"):
            prove_loss(wrong, point)


@pytest.mark.parametrize(
    ("push", "ratio"),
    [
        (Clipped(0.2), "token"),
        (Clipped(0.2, 0.28), "token"),
        (Clipped(3e-4, 4e-4), "sequence"),
        (Clipped(0.2), "sequence"),
        (Clipped(3e-4, 4e-4, delta=4.0), "token"),
        (DetachedWeight(1.2), "token"),
        (DetachedWeight(5.0), "token"),
    ],
    ids=str,
)
def test_a_forgotten_bound_is_noticed(push: Any, ratio: str) -> None:
    point = Objective("x", push, AGGREGATIONS["token_mean"], ratio)
    free = DetachedWeight(1e9) if isinstance(push, DetachedWeight) else replace(push, delta=None)
    free = Unclipped() if free == push else free
    with pytest.raises(RuntimeError, match="not the configured objective"):
        prove_loss(replace(point, surrogate=free).token_loss, point)


def test_a_loss_without_gradient_or_not_finite_is_refused() -> None:
    point = objective("grpo")

    def nothing(batch: TokenBatch) -> Tensor:
        return 0.0 * point.token_loss(batch)

    def broken(batch: TokenBatch) -> Tensor:
        return point.token_loss(batch) / torch.zeros(())

    with pytest.raises(ValueError, match="nothing would train"):
        prove_loss(nothing, point)
    with pytest.raises(ValueError, match="not finite"):
        prove_loss(broken, point)


def test_a_teams_own_part_is_said_to_be_unproved() -> None:
    mine = Objective("mine", lambda batch: -batch.ratio * batch.advantages, AGGREGATIONS["token_mean"])
    assert "not compared to a formula" in prove_loss(mine.token_loss, mine)
