"""A baseline leaves the policy gradient unbiased; dividing by σ, or keeping only the maximum, does not. Every group
enumerated, no sampling.

One question, answers y ∈ {0, 1, 2} from a softmax, groups of G = 3: 27 groups with their probabilities. What a rule
teaches on average is E[1/G Σ_i Â_i ∇log π(y_i)]; the truth is ∇E[r] (docs/algorithms/reinforce.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import advantage_rule
from reference.categorical import cosine, relative_error

ANSWERS, GROUP = 3, 3
GROUPS = torch.tensor(list(itertools.product(range(ANSWERS), repeat=GROUP)))
LOGITS = torch.tensor([0.3, -0.8, 0.9], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.2, 0.0], dtype=torch.float64)
EXACT = 1e-14  # 27 products of numbers of size 1 in float64


def expected(rule: Callable[[Tensor, int], Tensor], rewards: Tensor = REWARDS) -> Tensor:
    log_policy = LOGITS.log_softmax(0)
    probability = log_policy[GROUPS].sum(1).exp()
    score = torch.eye(ANSWERS, dtype=torch.float64) - log_policy.exp()  # ∇log π(y), row y
    advantages = rule(rewards[GROUPS].flatten(), GROUP).view(-1, GROUP, 1)
    return (probability.view(-1, 1) * (advantages * score[GROUPS]).mean(1)).sum(0)


def true_gradient(rewards: Tensor = REWARDS) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    (slope,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    return slope


@pytest.mark.parametrize(("rule", "factor"), [("raw", 1), ("leave_one_out", 1), ("group_mean", (GROUP - 1) / GROUP)])
def test_a_baseline_is_unbiased(rule: str, factor: float) -> None:
    """The group's own mean holds the reward itself, which costs (G − 1)/G and no direction."""
    assert relative_error(expected(advantage_rule(rule)), factor * true_gradient()) < EXACT


@pytest.mark.parametrize("baseline", [-3.0, 0.4, 10.0])
def test_any_constant_is_a_baseline(baseline: float) -> None:
    found = expected(lambda rewards, _: rewards - baseline)
    assert relative_error(found, true_gradient()) < 10 * EXACT * (1 + abs(baseline))


@pytest.mark.parametrize("rule", ["group_zscore", "group_max"])
def test_dividing_by_the_deviation_and_keeping_the_maximum_are_not(rule: str) -> None:
    """Not even up to a factor: the direction is another one."""
    found = expected(advantage_rule(rule))
    along = cosine(found, true_gradient())
    assert (1 - along**2) ** 0.5 > 0.02  # the part across
    assert along > 0  # and yet uphill


def test_the_deviation_weighs_questions() -> None:
    """Two questions of equal slope, pass rates 0.5 and about 0.05 or 0.95: the z-score teaches the lopsided one more,
    per unit of slope."""
    for rate in (0.05, 0.95):
        ratios = []
        for p in (0.5, rate):
            logit = torch.tensor([p / (1 - p), 1.0], dtype=torch.float64).log()
            groups = torch.tensor(list(itertools.product(range(2), repeat=8)))
            rewards = (groups == 0).double()
            probability = logit.log_softmax(0)[groups].sum(1).exp()
            advantages = advantage_rule("group_zscore")(rewards.flatten(), 8).view(-1, 8)
            score = rewards - p  # ∂ log π/∂ logit of the right answer
            taught = (probability * (advantages * score).mean(1)).sum()
            ratios.append((taught / (p * (1 - p))).item())
        assert ratios[1] > 1.15 * ratios[0]
