"""Which estimator is unbiased, and which answers weigh more: both from the code that trains, without sampling.

Three questions with tables of logits of their own (``diagnostics.enumeration``), answers of 1 to 3 tokens that are
right where a certain token stands in them, so that length goes with the reward. The expected gradient of a preset is
the sum over all 15⁴ groups of four answers, and is compared with ∇(mean pass rate) by its angle. The table in
``docs/labs/token_weights.md`` is written from here: ``python tests/reference/test_token_weight_bias.py --write`` (a
test compares).
"""

from __future__ import annotations

import functools
import math
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import advantage_rule
from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.diagnostics.enumeration import Tree
from grpo_lab.diagnostics.token_weights import FAMILIES, token_weights
from grpo_lab.objectives import Objective, aggregation, log_ratio, preset, surrogate

GROUP, RIGHT = 4, 2
PAGE = Path(__file__).resolve().parents[2] / "docs" / "labs" / "token_weights.md"
TREE = Tree.of(vocabulary=3)
REWARDS = ((TREE.tokens == RIGHT) & TREE.mask).any(1).double()
QUESTIONS = [
    TREE.logits(seed) + shift * torch.eye(3, dtype=torch.float64)[RIGHT] for seed, shift in enumerate((-1.5, 1, 5))
]
"""Hard, middling and easy: the right token's logits are lower or higher."""
HALVES = {
    "grpo without 1/σ": ("grpo", {"advantage": "group_mean"}),
    "dr_grpo with 1/σ": ("dr_grpo", {"advantage": "group_zscore"}),
}
SHOWN = {**{name: (name, {}) for name in ("grpo", "gspo", "dapo", "dr_grpo", "mirror_descent")}, **HALVES}


@functools.cache
def groups() -> Tensor:
    """``[50625, 4]``: every ordered group of four completions. (Of three, σ is the same in all that are not dead.)"""
    return torch.cartesian_prod(*[torch.arange(len(TREE.mask))] * GROUP)


def objective_of(name: str) -> Objective:
    row = preset(name)
    return Objective(name, surrogate(row.surrogate), aggregation(row.aggregation), ratio=row.ratio)


def expected_gradient(name: str, logits: Tensor, changed: dict[str, Any]) -> Tensor:
    """Of −loss, on-policy, by the question's logits; tokens are counted a group."""
    places, chances = groups().flatten(), TREE.chances(logits)[groups()].prod(1).repeat_interleave(GROUP)
    rule = advantage_rule(changed.get("advantage", preset(name).advantage))
    advantages = rule(REWARDS[places], GROUP).unsqueeze(1)
    mask, logps = TREE.mask[places], TREE.logps(logits)[places].requires_grad_()
    tokens = mask.sum(1).view(-1, GROUP).sum(1).repeat_interleave(GROUP).double().unsqueeze(1)
    objective = objective_of(name)
    batch = TokenBatch(logps, logps.detach(), log_ratio(objective.ratio, logps, logps.detach(), mask), advantages, mask)
    weights = token_weights(objective.loss(batch, Denominators(float(GROUP), tokens, 3.0)), logps)
    of_completions = torch.zeros_like(TREE.mask, dtype=torch.float64)
    of_completions.index_add_(0, places, chances.unsqueeze(1) * weights)
    return (of_completions.unsqueeze(-1) * TREE.scores(logits)).sum((0, 1))


def gradient_of_pass_rate(logits: Tensor) -> Tensor:
    """∇E[r], by autograd through the chances."""
    moved = logits.clone().requires_grad_()
    return torch.autograd.grad(TREE.chances(moved) @ REWARDS, moved)[0].flatten()


@functools.cache
def angle(label: str) -> float:
    """Between the expected gradient over the three questions and the true one, degrees."""
    name, changed = SHOWN[label]
    found = torch.cat([expected_gradient(name, logits, changed) for logits in QUESTIONS])
    true = torch.cat([gradient_of_pass_rate(logits) for logits in QUESTIONS])
    across = found - (found @ true) / (true @ true) * true
    return math.degrees(math.atan2(float(across.norm()), float(found @ true / true.norm())))


def test_the_questions_differ_in_difficulty_and_length_goes_with_the_reward() -> None:
    rates = [float(TREE.chances(logits) @ REWARDS) for logits in QUESTIONS]
    assert rates[0] < 0.1 < rates[1] < 0.9 < rates[2], rates
    lengths = TREE.mask.sum(1).double()
    assert lengths[REWARDS == 1].mean() > lengths[REWARDS == 0].mean()


@pytest.mark.not_fast
@pytest.mark.parametrize("label", ["dr_grpo", "mirror_descent"])
def test_a_constant_weight_without_sigma_is_the_policy_gradient(label: str) -> None:
    """In direction over all questions; in length (G − 1)/G of it, for the group's mean holds the answer itself."""
    name, changed = SHOWN[label]
    denominator = {"dr_grpo": 3.0, "mirror_descent": 1.0}[name]
    for logits in QUESTIONS:
        found = denominator * expected_gradient(name, logits, changed)
        torch.testing.assert_close(found, 3 / 4 * gradient_of_pass_rate(logits), rtol=1e-10, atol=1e-13)
    assert angle(label) < 1e-6
    assert FAMILIES[name].unbiased


@pytest.mark.parametrize("label", ["grpo", "gspo", "dapo", *HALVES])
def test_either_half_turns_the_gradient(label: str) -> None:
    assert angle(label) > 0.5


def relative(values: list[float]) -> str:
    return " : ".join(f"{value / values[0]:.3g}" for value in values)


def weights_at(name: str, lengths: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[list[float], list[float]]:
    """|w| of a token and of an answer of so many tokens, advantage 1, from the objective."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    logps = torch.full(mask.shape, -1.0, dtype=torch.float64).requires_grad_()
    objective, one = objective_of(name), torch.ones(len(lengths), 1, dtype=torch.float64)
    batch = TokenBatch(logps, logps.detach(), log_ratio(objective.ratio, logps, logps.detach(), mask), one, mask)
    found = token_weights(objective.loss(batch, Denominators(4.0, 15.0, 8.0)), logps).abs()
    return found[:, 0].tolist(), found.sum(1).tolist()


def sizes_at(name: str, changed: dict[str, Any]) -> list[float]:
    """Mean |Â| of a group of 8 with 1, 2 and 4 right answers."""
    rule = advantage_rule(changed.get("advantage", preset(name).advantage))
    rewards = [torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64) for right in (1, 2, 4)]
    return [rule(one, 8).abs().mean().item() for one in rewards]


def table() -> str:
    lines = [
        "| objective | a token of an answer of 1, 2, 4, 8 tokens | the whole answer | a group with 1, 2, 4 of 8 right "
        "| angle to ∇E[r] |",
        "|---|---|---|---|---|",
    ]
    for label, (name, changed) in SHOWN.items():
        cells = [*map(relative, weights_at(name)), relative(sizes_at(name, changed))]
        turned = angle(label)
        lines.append(f"| {label} | {' | '.join(cells)} | {'0' if turned < 1e-6 else f'{turned:.1f}°'} |")
    return "\n".join(lines)


MARKS = ("<!-- table: tests/reference/test_token_weight_bias.py -->", "<!-- end of table -->")


def test_the_page_shows_the_measured_table() -> None:
    found = re.search(
        f"{re.escape(MARKS[0])}\n(.*?)\n{re.escape(MARKS[1])}", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None, "the page lost its table"
    assert found.group(1) == table(), f"run: python {Path(__file__).name} --write"


def write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"({re.escape(MARKS[0])}\n).*?({re.escape(MARKS[1])})", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda match: f"{match.group(1)}{table()}\n{match.group(2)}", text), encoding="utf-8")


if __name__ == "__main__":
    print(table())
    if "--write" in sys.argv:
        write()
