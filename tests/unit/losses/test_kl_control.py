"""β as a controller: hand values, a closed loop around an exact policy, the same loop with the sign wrong, the door."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig
from grpo_lab.objectives import AdaptiveKL, KLTerm

REWARD = {"placement": "reward", "coefficient": 0.1}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (6.0, 0.5),  # on target: e = 0
        (6.6, 0.5 * 1.01),  # e = 0.1, times K = 0.1
        (5.7, 0.5 * 0.995),  # e = −0.05
        (60.0, 0.5 * 1.02),  # e = 9, held at 0.2
        (-3.0, 0.5 * 0.98),  # an estimate may be negative: e = −1.5, held at −0.2
    ],
)
def test_hand_values(measured: float, expected: float) -> None:
    assert AdaptiveKL(6.0).following(0.5, measured, 64) == pytest.approx(expected, rel=1e-15)


def test_horizon_is_trls_form() -> None:
    # TRL's old PPO: β · (1 + clip(9/6 − 1, ±0.2) · n/horizon), n = 500, horizon = 10,000: 1 + 0.2 · 0.05
    control = AdaptiveKL(6.0, horizon=10_000)
    assert control.following(0.2, 9.0, 500) == pytest.approx(0.2 * 1.01, rel=1e-15)
    small = 0.2
    for _ in range(5):  # five batches of 100 completions do what one of 500 does, to first order
        small = control.following(small, 9.0, 100)
    assert small == pytest.approx(0.2 * 1.01, rel=1e-4)


def kl_of_a_closed_loop(control: AdaptiveKL, sign: float, steps: int = 600) -> list[float]:
    """Gradient ascent on E[r] − β·KL(π‖ρ) over 8 outcomes, exact sums in float64; β by ``control``, KL measured before
    each step."""
    reward = torch.linspace(0, 1, 8, dtype=torch.float64)
    reference = torch.full((8,), -math.log(8), dtype=torch.float64)
    logits, beta, seen = reference.clone(), 0.05, []
    for _ in range(steps):
        logits = logits.detach().requires_grad_()
        log_policy = logits.log_softmax(0)
        policy = log_policy.exp()
        kl = (policy * (log_policy - reference)).sum()
        (slope,) = torch.autograd.grad((policy * reward).sum() - beta * kl, logits)
        seen.append(kl.item())
        logits = logits + 2.0 * slope
        turned = control.target + sign * (kl.item() - control.target)
        beta = control.following(beta, turned, 64)
    return seen


def within(seen: list[float], target: float, after: int) -> bool:
    return all(abs(kl / target - 1) <= 0.3 for kl in seen[after:])


def test_a_closed_loop_holds_its_target_and_a_wrong_sign_does_not() -> None:
    seen = kl_of_a_closed_loop(AdaptiveKL(0.5), sign=1.0)
    assert not within(seen[:1], 0.5, 0)  # it starts at the reference
    assert within(seen, 0.5, after=400)
    assert seen[-1] == pytest.approx(0.5, rel=0.02)
    assert not within(kl_of_a_closed_loop(AdaptiveKL(0.5), sign=-1.0), 0.5, after=400)


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        ({"placement": "loss", "coefficient": 0.1, "target": 6}, "`kl.placement: loss` charges none"),
        ({**REWARD, "rate": 0.1}, "`kl.rate` has an effect only with `kl.target`"),
        ({**REWARD, "horizon": 100}, "`kl.horizon` has an effect only with `kl.target`"),
        ({**REWARD, "target": 6, "rate": 0.1, "horizon": 100}, "two names"),
        ({**REWARD, "target": 0}, "`kl.target` is 0; it must be a number > 0"),
        ({**REWARD, "target": -1}, "`kl.target` is -1"),
        ({**REWARD, "target": 6, "rate": 5}, "must be < 5"),
        ({**REWARD, "target": 6, "horizon": 1}, "`kl.horizon` is 1 and a generation batch has 8 completions"),
        ({**REWARD, "targt": 6}, "target"),
    ],
)
def test_the_door(kl: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabConfig(output_dir="x", use_cpu=True, bf16=False, objective="dr_grpo", kl=kl)


def test_it_is_said_in_words() -> None:
    config = LabConfig(output_dir="x", use_cpu=True, bf16=False, objective="dr_grpo", kl={**REWARD, "target": 6})
    found = config.algorithm
    assert found.names["kl"] == "0.1·k3 in the reward, steered to 6 nats a completion"
    assert found.objective.kl == KLTerm(0.1, "k3", "reward", control=AdaptiveKL(6))


def test_a_kl_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="the measured KL is nan"):
        AdaptiveKL(1.0).following(0.1, math.nan, 8)
