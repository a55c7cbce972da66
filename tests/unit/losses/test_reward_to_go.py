"""Reward-to-go over own tokens, and the KL that is charged so: hand values, loops in float64 on ragged cases, the
door."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from grpo_lab.advantages import reward_to_go
from grpo_lab.objectives import KLTerm
from grpo_lab.trainer.settings.parse import KLSettings

#: log₂ T additions of at most T terms in float64; |terms| ≤ 40 · 20
EXACT = 1e-11


def literal(values: list[float], own: list[bool], gamma: float) -> list[float]:
    """Σ over own tokens s ≥ t of γ^(own tokens between) · v_s; 0 where the token is not own."""
    found = []
    for t in range(len(values)):
        later = [s for s in range(t, len(values)) if own[s]]
        found.append(math.fsum(gamma**n * values[s] for n, s in enumerate(later)) if own[t] else 0.0)
    return found


def kl_of(estimator: str, x: float) -> float:
    """x = log π_ref − log π."""
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1, "k1_clamped": max(-x, 0.0)}[estimator]


def ragged(rng: random.Random) -> tuple[list[list[float]], list[list[float]], list[list[bool]]]:
    """Log-probs of policy and reference and own tokens: padding behind, tool output within, rows without a token; NaN
    outside."""
    rows, width = rng.randrange(1, 6), rng.choice([1, 2, 3, 7, 8, 9, 40])
    policy, reference, own = [], [], []
    for _ in range(rows):
        length = rng.randrange(0, width + 1)
        mine = [t < length and rng.random() < 0.7 for t in range(width)]
        policy.append([rng.uniform(-4, 0) if m else math.nan for m in mine])
        reference.append([rng.uniform(-4, 0) if m else rng.choice([math.nan, math.inf, 0.0]) for m in mine])
        own.append(mine)
    return policy, reference, own


def test_hand_values() -> None:
    """Own tokens 0, 2, 3 (1 is a tool's, 4 padding) with 1, 2, 4 and γ = ½: 1 + ½·2 + ¼·4 = 3; 2 + ½·4 = 4; 4."""
    values = torch.tensor([[1.0, 9.0, 2.0, 4.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, False]])
    assert reward_to_go(values, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0, 0.0]]
    assert reward_to_go(values, mask).tolist() == [[7.0, 0.0, 6.0, 4.0, 0.0]]
    assert reward_to_go(values, mask, 0.0).tolist() == [[1.0, 0.0, 2.0, 4.0, 0.0]]


def test_against_loops() -> None:
    for seed in range(240):
        rng = random.Random(seed)
        policy, reference, own = ragged(rng)
        estimator = ("k1", "k2", "k3", "k1_clamped")[seed % 4]
        gamma, beta = rng.choice([1.0, 1.0, 0.99, 0.5, 0.0]), rng.choice([0.01, 0.5])
        kl = KLTerm(beta, estimator, "reward", per="token", gamma=gamma)
        mask = torch.tensor(own)
        each = kl.of_tokens(
            torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), mask
        )
        found = -beta * reward_to_go(each, mask, gamma)
        for row, (new, ref, mine) in enumerate(zip(policy, reference, own, strict=True)):
            kls = [kl_of(estimator, b - a) if m else math.nan for a, b, m in zip(new, ref, mine, strict=True)]
            expected = [-beta * value for value in literal(kls, mine, gamma)]
            assert found[row].tolist() == pytest.approx(expected, rel=0, abs=EXACT), seed
            if gamma == 1.0 and any(mine):  # the first own token carries what a completion pays per sequence
                total = kl.in_reward(torch.tensor([new]), torch.tensor([ref]), mask[row : row + 1]).item()
                assert found[row, mine.index(True)].item() == pytest.approx(
                    -beta * total, rel=1e-5, abs=1e-5
                )  # float32


def test_estimates_of_tokens_carry_no_gradient_and_the_clamped_one_is_never_negative() -> None:
    policy, reference = torch.randn(2, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(50, 4, dtype=torch.bool)
    clamped = KLTerm(0.1, "k1_clamped", "reward").of_tokens(policy.requires_grad_(), reference, mask)
    plain = KLTerm(0.1, "k1", "reward").of_tokens(policy, reference, mask)
    assert not clamped.requires_grad
    assert (clamped >= 0).all()
    assert torch.equal(clamped[plain > 0], plain[plain > 0])
    assert (clamped[plain <= 0] == 0).all()
    assert (plain < 0).any()


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan, math.inf])
def test_a_discount_lies_between_0_and_1(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        reward_to_go(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), gamma)
    with pytest.raises(ValueError, match=r"kl\.gamma"):
        KLTerm(0.1, "k1", "reward", per="token", gamma=gamma)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (KLTerm, {"coefficient": 0.1, "estimator": "k1_clamped"}, "k1_clamped"),
        (KLTerm, {"coefficient": 0.1, "placement": "reward", "per": "step"}, r"kl\.per.*'step'.*sequence.*token"),
        (KLTerm, {"coefficient": 0.1, "per": "token"}, r"kl\.per.*no effect"),
        (KLTerm, {"coefficient": 0.1, "placement": "reward", "gamma": 0.9}, r"kl\.gamma.*kl\.per: token"),
        (KLSettings, {"per": "sequence"}, r"kl\.per.*no effect"),
        (KLSettings, {"placement": "reward", "gamma": 1.0}, r"kl\.gamma.*kl\.per: token"),
    ],
)
def test_what_would_have_no_effect_is_refused(kind: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**settings)
