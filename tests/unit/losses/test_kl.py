"""KL estimators: hand values, the door. Gradients by exact enumeration: ``tests/reference/test_kl_gradients.py``."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lab.objectives import KLTerm, TokenBatch, k1, k2, k3, log_ratio
from reference.cases import poisoned, random_batch

POLICY = torch.tensor([[-1.0, -2.0], [-0.5, -0.5]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.0 + math.log(2), -2.0], [-0.5 - math.log(2), -0.5]], dtype=torch.float64)
MASK = torch.tensor([[True, True], [True, False]])
LOG2 = math.log(2)


def test_hand_values() -> None:
    """x = log 2 and −log 2: k1 = −x; k2 = x²/2; k3 = 2 − log 2 − 1 and ½ + log 2 − 1. 0 where the policies agree."""
    for estimator, expected in (
        (k1, [-LOG2, LOG2]),
        (k2, [LOG2**2 / 2] * 2),
        (k3, [1 - LOG2, LOG2 - 0.5]),
    ):
        found = estimator(POLICY, REFERENCE)
        assert found[:, 0].tolist() == pytest.approx(expected, rel=1e-14)
        assert found[:, 1].tolist() == [0.0, 0.0]


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


@pytest.mark.parametrize("ratio", ["token", "product"])
def test_a_small_ratio_times_a_large_k3_is_their_product_in_float32_too(ratio: str) -> None:
    """x = 98 at the first token: eˣ is infinite in float32, and ρ·k3 = e^−98·(e^98 − 99) is 1; with the row's ratio,
    e^−98.5 (0 in float32), it is 0.61."""
    logps = torch.tensor([[-100.0, -1.0, -2.0]], dtype=torch.float64)
    old, ref = torch.tensor([[-2.0, -0.5, -2.0]]).double(), torch.tensor([[-2.0, -0.9, -2.0]]).double()
    mask, found = torch.ones(1, 3, dtype=torch.bool), {}
    for dtype in (torch.float64, torch.float32):
        moving = logps.to(dtype).requires_grad_()
        step = log_ratio(ratio, moving, old.to(dtype), mask)
        batch = TokenBatch(moving, old.to(dtype), step, torch.ones(1, 1, dtype=dtype), mask, ref.to(dtype))
        value = KLTerm(1.0, "k3", ratio_weighted=True).in_loss(batch)
        (gradient,) = torch.autograd.grad(value.sum(), moving)
        found[dtype] = (value.detach().double(), gradient.double())
    x = ref - logps
    ratios = (logps - old).sum(1, keepdim=True).exp() if ratio == "product" else (logps - old).exp()
    torch.testing.assert_close(found[torch.float64][0], ratios * (x.exp() - x - 1), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[torch.float32], found[torch.float64], rtol=1e-4, atol=1e-6)


def test_the_door() -> None:
    with pytest.raises(ValueError, match=r"`kl.estimator` is 'k4'; it must be one of"):
        KLTerm(0.1, "k4")
    with pytest.raises(ValueError, match=r"`kl.placement` is 'advantage'; it must be one of"):
        KLTerm(0.1, "k1", "advantage")
    for coefficient in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"`kl.coefficient` .* must be a finite number ≥ 0"):
            KLTerm(coefficient)
    with pytest.raises(ValueError, match=r"`kl.ratio_weighted` has no effect"):
        KLTerm(0.1, "k1", "reward", ratio_weighted=True)
    with pytest.raises(ValueError, match="needs reference log-probs"):
        KLTerm(0.1).in_reward(POLICY, None, MASK)  # type: ignore[arg-type]
