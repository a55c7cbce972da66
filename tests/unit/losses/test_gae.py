"""``gae``: hand values, a literal float64 loop on ragged masks, its two ends, the door."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grpo_lab.advantages import gae, reward_to_go

#: at most 40 terms of size ≤ 30 in float64, added in another order
EXACT = 1e-11


def literal(
    rewards: list[float], values: list[float], own: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Backward in time from own token to own token; the value after the last one is 0."""
    advantages, returns = [0.0] * len(own), [0.0] * len(own)
    ahead, next_value = 0.0, 0.0
    for t in reversed(range(len(own))):
        if own[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            ahead = delta + gamma * lam * ahead
            advantages[t], returns[t], next_value = ahead, ahead + values[t], values[t]
    return advantages, returns


def test_hand_values() -> None:
    """Own tokens 0 and 2 (1 is a tool's, 3 padding), r = (1, 2), V = (0.5, 1), γ = 0.5, λ = 0.8:
    δ₂ = 2 − 1 = 1; δ₀ = 1 + 0.5·1 − 0.5 = 1; Â₀ = 1 + 0.4·1 = 1.4; R = (1.9, 2)."""
    rewards = torch.tensor([[1.0, math.nan, 2.0, 9.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, math.inf, 1.0, 9.0]], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.tensor([[True, False, True, False]]), 0.5, 0.8)
    assert advantages.tolist() == [[pytest.approx(1.4, abs=1e-15), 0.0, 1.0, 0.0]]
    assert returns.tolist() == [[pytest.approx(1.9, abs=1e-15), 0.0, 2.0, 0.0]]


@pytest.mark.parametrize("seed", range(30))
def test_against_loops(seed: int) -> None:
    """150 rows and more: padding behind, holes within, rows without a token; NaN where nobody may look."""
    rng = random.Random(seed)
    width, rows = rng.choice([1, 2, 3, 8, 17, 40]), rng.randrange(5, 9)
    gamma, lam = rng.choice([1.0, 0.99, 0.5, 0.0]), rng.choice([1.0, 0.95, 0.3, 0.0])
    own = []
    for _ in range(rows):
        length = rng.randrange(width + 1)
        own.append([t < length and rng.random() < 0.8 for t in range(width)])
    rewards = [[rng.uniform(-3, 3) if m else math.nan for m in row] for row in own]
    values = [[rng.uniform(-3, 3) if m else math.inf for m in row] for row in own]
    found = gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(own),
        gamma,
        lam,
    )
    for row in range(rows):
        expected = literal(rewards[row], values[row], own[row], gamma, lam)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[row].tolist() == pytest.approx(theirs, rel=0, abs=EXACT)


def test_its_two_ends() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(20, 9, dtype=torch.float64, generator=draw) for _ in range(2))
    mask = torch.rand(20, 9, generator=draw) < 0.7
    advantages, returns = gae(rewards, torch.zeros_like(values), mask, 0.9, 1.0)
    assert torch.equal(advantages, reward_to_go(rewards, mask, 0.9))
    assert torch.equal(returns, advantages)
    monte_carlo = gae(rewards, values, mask, 0.9, 1.0)[1]  # λ = 1: returns do not depend on the values
    assert torch.allclose(monte_carlo, reward_to_go(rewards, mask, 0.9), rtol=0, atol=EXACT)
    one_step = gae(rewards, values, mask, 0.0, 0.7)[0]
    assert torch.allclose(one_step, (rewards - values).masked_fill(~mask, 0.0), rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("gamma", "lam", "said"), [(1.1, 0.9, "gamma is 1.1"), (1.0, -0.1, "lam is -0.1"), (1.0, math.nan, "lam is nan")]
)
def test_what_is_no_discount(gamma: float, lam: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gae(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), gamma, lam)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[\(1, 2\), \(1, 3\), \(1, 2\)\]"):
        gae(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool))
    for shape in ((2,), (1, 1, 2)):
        with pytest.raises(ValueError, match=r"must be one shape \[B, T\]"):
            gae(torch.zeros(shape), torch.zeros(shape), torch.ones(shape, dtype=torch.bool))
