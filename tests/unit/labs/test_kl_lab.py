"""``grpo-lab lab kl``: the enumeration is complete, what is known to be exact is, and samples find the same numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from documentation.blocks import ROOT
from grpo_lab.cli import main
from grpo_lab.diagnostics.enumeration import Tree
from grpo_lab.labs.kl import ESTIMATORS, SAMPLINGS, EstimatorErrors, Sampling, World, estimates, measured
from reference.test_kl_gradients import (
    WORLD,
    in_loss,
    in_reward,
    noise,
    per_prefix_gradient,
    per_token_in_reward,
    relative_error,
    true_gradient,
)

EXACT = 1e-12
"""float64, sums of 40 terms in another order."""
LOSS, SUM, TOKEN = "loss", "reward, sum", "reward, per token"
ON, OFF = SAMPLINGS["on-policy"], SAMPLINGS["off-policy"]
BY_COMPLETION = SAMPLINGS["off-policy, by completion"]
CELLS = [(name, place, one) for name, how in SAMPLINGS.items() for place in how.places for one in ESTIMATORS]


def of(estimator: str, place: str, sampling: Sampling, seed: int = 0) -> EstimatorErrors:
    return measured(World.of(seed), estimator, place, sampling)


# -- the enumeration ---------------------------------------------------------------------------------------------------


def test_every_completion_is_there_once_with_its_chance() -> None:
    """1 of one token, 3 of two, 9 · 4 of three; the chances by going down the tree, one softmax a step."""
    tree, logits = Tree.of(), Tree.of().logits(5)
    found = {
        tuple(row[:n]): chance
        for row, n, chance in zip(
            tree.tokens.tolist(), tree.mask.sum(1).tolist(), tree.chances(logits).tolist(), strict=True
        )
    }
    assert len(found) == 40
    assert sorted(map(len, found)) == [1] + [2] * 3 + [3] * 36
    assert math.fsum(found.values()) == pytest.approx(1.0, rel=EXACT)
    rows = iter(logits.tolist())
    prefixes: list[tuple[int, ...]] = [(), *((a,) for a in (1, 2, 3)), *((a, b) for a in (1, 2, 3) for b in (1, 2, 3))]
    of_prefix = {prefix: [math.exp(x) for x in next(rows)] for prefix in prefixes}
    for one, chance in found.items():
        steps = [of_prefix[one[:t]][one[t]] / sum(of_prefix[one[:t]]) for t in range(len(one))]
        assert chance == pytest.approx(math.prod(steps), rel=EXACT)


def test_scores_are_what_autograd_says_and_two_ways_to_the_kl_are_one() -> None:
    world = World.of(3)
    tree, logits = world.tree, world.policy.clone().requires_grad_()
    weights = torch.sin(torch.arange(tree.mask.numel(), dtype=torch.float64)).view(tree.mask.shape)
    (by_autograd,) = torch.autograd.grad((weights * tree.logps(logits)).sum(), logits)
    by_scores = (weights.unsqueeze(-1) * tree.scores(world.policy)).sum((0, 1))
    torch.testing.assert_close(by_scores, by_autograd.flatten(), rtol=EXACT, atol=1e-13)
    whole = float(tree.divergence(world.policy, world.reference))
    assert whole == pytest.approx(float(tree.divergence_of_next_tokens(world.policy, world.reference)), rel=EXACT)
    assert whole > 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("ratio", [False, True])
def test_completions_of_one_length_are_the_other_enumeration_s(estimator: str, ratio: bool) -> None:
    """64 sequences without an end: every number that tests/reference has by other code."""
    world = World(Tree.of(end=None), WORLD.policy, WORLD.reference, WORLD.policy)
    weighed = SAMPLINGS["on-policy, ratio in the loss"] if ratio else ON
    other = {
        LOSS: (in_loss(WORLD, estimator, ratio), noise(WORLD, estimator, "loss", ratio)),
        SUM: (in_reward(WORLD, estimator), noise(WORLD, estimator, "reward", False)),
        TOKEN: (per_token_in_reward(WORLD, estimator), noise(WORLD, estimator, "token", False)),
    }
    for place, (gradient, spread) in other.items():
        found = measured(world, estimator, place, weighed)
        assert found.gradient_bias == pytest.approx(relative_error(gradient, true_gradient(WORLD)), rel=1e-9, abs=EXACT)
        next_token = (gradient - per_prefix_gradient(WORLD)).norm() / true_gradient(WORLD).norm()
        assert found.next_token_bias == pytest.approx(float(next_token), rel=1e-9, abs=EXACT)
        assert found.gradient_std == pytest.approx(spread, rel=1e-9)


# -- what is known -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_what_is_exact_on_policy(seed: int) -> None:
    for place in (SUM, TOKEN):
        assert of("k1", place, ON, seed).gradient_bias < EXACT
    assert of("k1", TOKEN, ON, seed).gradient_std < of("k1", SUM, ON, seed).gradient_std
    assert of("k1", LOSS, ON, seed).gradient_bias == pytest.approx(1.0, abs=EXACT)  # no gradient at all
    assert of("k2", LOSS, ON, seed).next_token_bias < EXACT < 0.01 < of("k2", LOSS, ON, seed).gradient_bias
    ratio = SAMPLINGS["on-policy, ratio in the loss"]
    assert of("k3", LOSS, ratio, seed).next_token_bias < EXACT  # TRL's default is k2's gradient
    assert of("k3", LOSS, ratio, seed).gradient_std == pytest.approx(of("k2", LOSS, ON, seed).gradient_std, rel=EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_biased_on_policy(seed: int) -> None:
    assert of("k3", LOSS, ON, seed).next_token_bias > 0.05
    for estimator in ("k2", "k3"):
        for place in (SUM, TOKEN):
            assert of(estimator, place, ON, seed).gradient_bias > 0.3


@pytest.mark.parametrize("seed", range(3))
def test_values_on_policy(seed: int) -> None:
    """k1 and k3 unbiased, k2 not; near the reference k3 varies least: x²/2 beside x."""
    for estimator, unbiased in (("k1", True), ("k2", False), ("k3", True)):
        assert (abs(of(estimator, LOSS, ON, seed).value_bias) < EXACT) is unbiased
    near = World.of(seed, 0.05)
    stds = {one: measured(near, one, LOSS, ON).value_std for one in ESTIMATORS}
    assert stds["k3"] < 0.1 * stds["k1"]


@pytest.mark.parametrize("seed", range(3))
def test_off_policy_the_product_of_ratios_makes_exact_what_was_and_nothing_less_does(seed: int) -> None:
    for place in (SUM, TOKEN):
        assert of("k1", place, BY_COMPLETION, seed).gradient_bias < EXACT
        assert of("k1", place, SAMPLINGS["off-policy, by token"], seed).gradient_bias > 0.01
        assert of("k1", place, OFF, seed).gradient_bias > 0.05
    for estimator in ("k1", "k3"):
        assert abs(of(estimator, LOSS, BY_COMPLETION, seed).value_bias) < EXACT
        assert of(estimator, LOSS, BY_COMPLETION, seed).gradient_bias < EXACT  # ∇E[Πρ·Σk], k unbiased
        assert abs(of(estimator, LOSS, OFF, seed).value_bias) > 1e-3
    late = SAMPLINGS["off-policy, by completion, k at generation"]
    assert of("k1", SUM, late, seed).gradient_bias > 0.05  # ∇KL(π‖μ) is missing


def test_off_policy_by_the_policy_itself_is_on_policy() -> None:
    world = World.of(1)
    world = replace(world, sampler=world.policy)
    for place in (SUM, TOKEN):
        for sampling in (OFF, SAMPLINGS["off-policy, by token"], BY_COMPLETION):
            assert vars(measured(world, "k2", place, sampling)) == pytest.approx(vars(of("k2", place, ON, 1)), rel=1e-9)


@pytest.mark.parametrize(("name", "place", "estimator"), CELLS)
def test_samples_agree_with_the_enumeration(name: str, place: str, estimator: str) -> None:
    """20,000 completions: the value within 5 standard errors, the gradient's error no longer than twice its expected
    length."""
    draws, world = 20_000, World.of(0)
    chances, values, gradients = estimates(world, estimator, place, SAMPLINGS[name])
    picked = torch.multinomial(chances, draws, replacement=True, generator=torch.Generator().manual_seed(1))
    expected, mean = chances @ values, chances @ gradients
    error = ((values - expected).square() @ chances / draws).sqrt()
    assert abs(float(values[picked].mean() - expected)) <= 5 * float(error)
    length = ((gradients - mean).square().sum(1) @ chances / draws).sqrt()
    assert float((gradients[picked].mean(0) - mean).norm()) <= 2 * float(length)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.not_fast
def test_the_command_writes_table_and_figure_and_repeats_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["lab", "kl", "--folder", str(tmp_path), "--seeds", "0", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "| on-policy | k1 | reward, sum | 0 |" in printed
    assert (tmp_path / "kl.md").read_text().strip() in printed
    assert (tmp_path / "kl.png").stat().st_size > 10_000
    record = tmp_path / "on-policy-0" / "arm.json"
    before = record.read_text()
    assert main(words) == 0
    assert record.read_text() == before
    assert len(json.loads(before)["rows"]) == 9
    assert main([*words, "--set", "epsilon", "0.3"]) == 2
    assert "lab 'kl' trains nothing" in capsys.readouterr().err
    assert main([*words, "--arms", "sideways"]) == 2


@pytest.mark.not_fast
def test_rows_of_the_page_are_rows_of_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "kl", "--folder", str(tmp_path)]) == 0
    printed = (tmp_path / "kl.md").read_text().splitlines()
    page = (ROOT / "docs" / "labs" / "kl.md").read_text(encoding="utf-8").splitlines()
    shown = [line for line in page if line.startswith("|")]
    assert len(shown) > 10
    assert [line for line in printed if line in shown] == shown
    assert len([line for line in printed if line.startswith("| o")]) == 45  # the page says so
