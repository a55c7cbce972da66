"""Gates, VESPO's weight and the entropy bonus: against TRL's own functions, by hand, and by parts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_lab.batch import SAMPLER_LOGPS, TokenBatch
from grpo_lab.objectives import (
    AGGREGATIONS,
    AdaptiveEntropy,
    Clipped,
    EntropyBonus,
    GammaWeight,
    Objective,
    OffPolicyMask,
    TopEntropy,
    kept_tokens,
)
from grpo_lab.trainer.exactness.loss_proof import prove_loss, toy_batch, vanishes_without_advantage, wide_toy_batch
from reference.cases import DENOMINATORS, random_batch, rows_of

GATED = Objective("gated", Clipped(), AGGREGATIONS["token_mean"], gates=(OffPolicyMask(0.1), TopEntropy(0.5)))
ALONE = SimpleNamespace(pad_across_processes=lambda values, **_: values, gather=lambda values: values)


def sampled(seed: int, **options: Any) -> TokenBatch:
    """With log-probs of an engine, some of them unscored (NaN)."""
    batch = random_batch(seed, **options)
    engine = batch.proximal_logps + 0.3 * torch.sin(7 * batch.proximal_logps)
    engine[0, 1] = float("nan")
    return replace(batch, extras={SAMPLER_LOGPS: engine})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("reported", [True, False])
def test_the_off_policy_mask_is_trls(seed: int, reported: bool) -> None:
    batch = sampled(seed, per_token=seed == 3)
    engine = batch.extras[SAMPLER_LOGPS]
    if not reported:
        batch = replace(batch, extras={})
        engine = batch.proximal_logps
    for threshold in (-0.2, 0.0, 0.2):
        stock = GRPOTrainer.get_off_policy_mask(batch.advantages, batch.logps, engine, batch.mask.long(), threshold)
        assert torch.equal(OffPolicyMask(threshold)(batch), stock.double())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_the_chosen_tokens_are_trls(share: float) -> None:
    batch = random_batch(2)
    assert batch.entropies is not None
    trainer: Any = SimpleNamespace(accelerator=ALONE)
    stock = GRPOTrainer.get_high_entropy_mask(trainer, batch.entropies.float(), batch.mask, 1 - share)
    assert torch.equal(TopEntropy(share).select(batch, lambda values: values), stock)
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    assert not TopEntropy(share).select(nothing, lambda values: values).any()


@pytest.mark.parametrize("weights", [None, "token"])
def test_vespos_weight_is_trls(weights: str | None) -> None:
    for seed in range(4):
        batch = random_batch(seed, weights=weights, spread=1.5)
        moved = batch.logps.detach() - batch.proximal_logps
        # TRL's weights are 1 where masked, and it sums over all of them
        correction = None if weights is None else batch.sampler_weights.masked_fill(~batch.mask, 1.0)  # type: ignore[union-attr]
        # it holds k and λ in float32
        stock = GRPOTrainer.get_gamma_weights(batch.advantages, moved, batch.mask, correction, 1.5, 2.0, 2.5, 0.7)
        torch.testing.assert_close(GammaWeight(1.5, 2.0, 2.5, 0.7).weight(batch), stock, rtol=1e-6, atol=1e-9)


def test_vespo_without_decay_is_proved() -> None:
    """λ = 0 counts as 1e-4, as in TRL: in the tensors and in the formula of the start-up proof."""
    objective = Objective("vespo", GammaWeight(1.0, 0.0, 1.0, 0.0), AGGREGATIONS["token_mean"])
    assert "proved on a toy batch" in prove_loss(objective.token_loss, objective)


def test_gates_by_hand() -> None:
    """Two rows of negative advantage whose mean log μ/π is 0.25 and −0.5; entropies 1, 2, 3, 4: the upper half."""
    logps = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)
    old = logps + torch.tensor([[0.5, 0.0], [-0.5, -0.5]])
    entropies = torch.tensor([[1.0, 4.0], [3.0, 2.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages = torch.full((2, 1), -1.0, dtype=torch.float64)
    batch = TokenBatch(logps, old, logps - old, advantages, mask, entropies=entropies)
    assert OffPolicyMask(0.1)(batch).tolist() == [[0.0], [1.0]]
    assert OffPolicyMask(0.25)(batch).tolist() == [[1.0], [1.0]]
    assert OffPolicyMask(0.1)(replace(batch, advantages=-advantages)).tolist() == [[1.0], [1.0]]
    assert TopEntropy(0.5).select(batch, lambda values: values).tolist() == [[False, True], [True, False]]


def test_a_gated_loss_is_proved_and_still_vanishes_without_advantage() -> None:
    assert "proved on a toy batch" in prove_loss(GATED.token_loss, GATED)
    assert vanishes_without_advantage(GATED.token_loss, GATED)
    dropped = replace(GATED, gates=())
    for batch in (toy_batch(GATED), wide_toy_batch(GATED)):
        assert GATED.token_loss(batch).abs().sum() < dropped.token_loss(batch).abs().sum(), "nothing was gated"
    with pytest.raises(RuntimeError, match="not the configured objective"):
        prove_loss(dropped.token_loss, GATED)


def bonus_alone(batch: TokenBatch, tokens: Tensor | float) -> tuple[float, Tensor]:
    entropies = batch.entropies.clone().requires_grad_()  # type: ignore[union-attr]
    counted = replace(DENOMINATORS, micro_batch_tokens=tokens)
    loss = EntropyBonus(0.3).loss(replace(batch, entropies=entropies), counted)
    return loss.item(), torch.autograd.grad(loss, entropies)[0]


def test_the_bonus_by_hand_and_by_parts() -> None:
    """−0.3 · Σ H / tokens / 3 micro-batches; its gradient is a constant on the tokens, and rows may be cut anyhow."""
    batch = random_batch(4)
    kept = batch.mask
    tokens = float(kept.sum())
    loss, gradient = bonus_alone(batch, tokens)
    by_hand = sum(h for row, m in zip(batch.entropies.tolist(), kept.tolist()) for h, take in zip(row, m) if take)  # type: ignore[union-attr]
    assert loss == pytest.approx(-0.3 * by_hand / tokens / 3, rel=1e-12)
    torch.testing.assert_close(gradient, -0.3 / tokens / 3 * kept.double(), rtol=1e-12, atol=0)
    each = torch.full((5, 1), tokens, dtype=torch.float64)
    parts = [torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([2, 4])]
    apart = sum(bonus_alone(rows_of(batch, "token", part), each[part])[0] for part in parts)
    assert apart == pytest.approx(loss, rel=1e-12)
    chosen = {"top_entropy": torch.ones_like(kept).tril()}
    assert torch.equal(kept_tokens(replace(batch, chosen=chosen)), kept & chosen["top_entropy"])
    assert (bonus_alone(replace(batch, chosen=chosen), tokens)[1] != 0).equal(kept & chosen["top_entropy"])


def test_an_objective_with_a_bonus_adds_it_once() -> None:
    batch = random_batch(4)
    plain = replace(GATED, gates=())
    counted = replace(DENOMINATORS, micro_batch_tokens=7.0)
    both = replace(plain, entropy=EntropyBonus(0.3)).loss(batch, counted)
    assert both.item() == pytest.approx(plain.loss(batch, counted).item() + bonus_alone(batch, 7.0)[0], rel=1e-12)


def test_the_coefficient_is_steered_by_the_step_before() -> None:
    control = AdaptiveEntropy(target=1.0, delta=0.02, lowest=0.01, highest=0.05)
    found, coefficient = [], 0.03
    assert control.in_force(coefficient, float("inf")) == 0.0, "nothing is applied before the first measurement"
    for measured in (1.5, 1.5, 1.0, 0.4, 0.3, 0.2):
        coefficient = control.following(coefficient, measured)
        found.append((round(coefficient, 6), control.in_force(coefficient, measured) > 0))
    assert found == [(0.01, False), (0.01, False), (0.03, True), (0.05, True), (0.05, True), (0.05, True)]
