"""KL estimators: hand values, the door. Gradients by exact enumeration: ``tests/reference/test_kl_gradients.py``."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lab.objectives import KLTerm, k1, k2, k3
from reference.cases import poisoned, random_batch

POLICY = torch.tensor([[-1.0, -2.0], [-0.5, -0.5]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.0 + math.log(2), -2.0], [-0.5 - math.log(2), -0.5]], dtype=torch.float64)
MASK = torch.tensor([[True, True], [True, False]])
LOG2 = math.log(2)


def test_hand_values() -> None:
    # x = log 2 and −log 2: k1 = −x; k2 = x²/2; k3 = 2 − log 2 − 1 and ½ + log 2 − 1
    assert k1(POLICY, REFERENCE)[:, 0].tolist() == pytest.approx([-LOG2, LOG2], rel=1e-14)
    assert k2(POLICY, REFERENCE)[:, 0].tolist() == pytest.approx([LOG2**2 / 2] * 2, rel=1e-14)
    assert k3(POLICY, REFERENCE)[:, 0].tolist() == pytest.approx([1 - LOG2, LOG2 - 0.5], rel=1e-14)


def test_all_are_zero_where_the_policies_agree() -> None:
    for estimator in (k1, k2, k3):
        assert estimator(POLICY, POLICY).abs().sum().item() == 0.0


def test_k2_and_k3_are_never_negative_and_k1_can_be() -> None:
    policy, reference = torch.randn(2, 1000, dtype=torch.float64)
    assert (k2(policy, reference) >= 0).all()
    assert (k3(policy, reference) >= 0).all()
    assert (k1(policy, reference) < 0).any()


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_gradcheck(estimator: object) -> None:
    policy = POLICY.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda p: estimator(p, REFERENCE), policy)  # type: ignore[operator]


@pytest.mark.parametrize(("name", "first", "second"), [("k1", -LOG2, LOG2), ("k2", LOG2**2 / 2, LOG2**2 / 2)])
def test_in_the_reward_it_is_the_sum_over_the_completion(name: str, first: float, second: float) -> None:
    found = KLTerm(0.1, name, "reward").in_reward(POLICY.clone().requires_grad_(), REFERENCE, MASK)
    assert found.tolist() == pytest.approx([first, second], rel=1e-14)
    assert not found.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_masked_positions_may_hold_anything(name: str, weighted: bool, bad: float) -> None:
    term = KLTerm(0.1, name, ratio_weighted=weighted)
    for ratio in ("token", "sequence"):
        clean = random_batch(ratio=ratio)
        dirty = poisoned(clean, ratio, bad)
        found = [
            torch.autograd.grad(term.in_loss(batch).masked_fill(~batch.mask, 0.0).sum(), batch.logps)[0]
            for batch in (clean, dirty)
        ]
        assert torch.equal(*found)
        assert (found[1][~dirty.mask] == 0).all()
        assert term.in_reward(dirty.logps, dirty.ref_logps, dirty.mask).isfinite().all()  # type: ignore[arg-type]


def test_ratio_weighting_multiplies_by_the_ratio_and_does_not_detach_it() -> None:
    batch = random_batch(seed=3)
    assert batch.ref_logps is not None
    plain, weighted = KLTerm(1.0, "k3").in_loss(batch), KLTerm(1.0, "k3", ratio_weighted=True).in_loss(batch)
    chosen = batch.mask
    assert torch.allclose(weighted[chosen], (plain * batch.ratio)[chosen], rtol=1e-15)
    (gradient,) = torch.autograd.grad(weighted[chosen].sum(), batch.logps)
    # d(ρ·k3)/d log π = ρ·k3 + ρ·(1 − eˣ) = −ρ·x: k2's gradient times the ratio
    x = (batch.ref_logps - batch.logps).detach()
    assert torch.allclose(gradient[chosen], (-batch.ratio.detach() * x)[chosen], rtol=1e-12)


def test_the_door() -> None:
    with pytest.raises(ValueError, match=r"`kl.estimator` is 'k4'; it must be one of"):
        KLTerm(0.1, "k4")
    with pytest.raises(ValueError, match=r"`kl.placement` is 'advantage'; it must be one of"):
        KLTerm(0.1, "k1", "advantage")
    for coefficient in (-0.1, math.nan):
        with pytest.raises(ValueError, match=r"`kl.coefficient` .* must be ≥ 0"):
            KLTerm(coefficient)
    with pytest.raises(ValueError, match=r"`kl.ratio_weighted` has no effect"):
        KLTerm(0.1, "k1", "reward", ratio_weighted=True)
    with pytest.raises(ValueError, match="needs reference log-probs"):
        KLTerm(0.1).in_reward(POLICY, None, MASK)  # type: ignore[arg-type]
