"""What each KL estimator does to the policy, by exact enumeration (no sampling): estimator × placement, on-policy.

The gradients come from the code that trains (``KLTerm``, ``Objective``), weighted by the probability of every sequence,
and are compared with the gradient of KL(π‖π_ref) of the distribution over whole sequences. The table in
``docs/algorithms/kl.md`` is written from here: ``python tests/reference/test_kl_gradients.py --write`` (a test
compares).
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import GroupMean, LeaveOneOut, reward_to_go
from grpo_lab.objectives import Clipped, KLTerm, Objective, Reinforce, Unclipped, token_mean
from reference.categorical import PREFIX_OF, SEQUENCES, World, cosine, random_logits, relative_error, token_logps

EXACT = {"rtol": 1e-12, "atol": 1e-13}
"""float64, sums of 64 terms in another order."""
WORLD = World(random_logits(0), random_logits(1))
BLIND = World(random_logits(0, blind=True), random_logits(1, blind=True))
PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "kl.md"
ESTIMATORS = ("k1", "k2", "k3")


def true_gradient(world: World) -> Tensor:
    return world.gradient(world.divergence)


def per_prefix_gradient(world: World, forward: bool = False) -> Tensor:
    return world.gradient(lambda logits: world.divergence_per_prefix(logits, forward))


def in_loss(world: World, estimator: str, ratio_weighted: bool = False) -> Tensor:
    """Expected gradient of Σ_t k_t with coefficient 1 and every advantage 0."""
    objective = Objective("kl", Unclipped(), token_mean, kl=KLTerm(1.0, estimator, ratio_weighted=ratio_weighted))

    def expected_loss(logits: Tensor) -> Tensor:
        token_loss = objective.token_loss(world.on_policy_batch(logits))
        return (world.probabilities.unsqueeze(1) * token_loss).sum()

    return world.gradient(expected_loss)


def in_reward(world: World, estimator: str, push: object = None) -> Tensor:
    """Expected policy gradient where the reward of a sequence is −Σ_t k_t (and nothing else)."""
    logps, reference = token_logps(world.policy), token_logps(world.reference)
    mask = torch.ones_like(logps, dtype=torch.bool)
    reward = -KLTerm(1.0, estimator, "reward").in_reward(logps, reference, mask)
    return policy_gradient(world, reward, push or Reinforce())


def per_token_in_reward(world: World, estimator: str) -> Tensor:
    """Expected policy gradient where every token's advantage is −Σ of the k from it on (``kl.per: token``, γ = 1)."""
    return policy_gradient(world, -to_go(world, estimator), Reinforce())


def to_go(world: World, estimator: str) -> Tensor:
    logps, reference = token_logps(world.policy), token_logps(world.reference)
    mask = torch.ones_like(logps, dtype=torch.bool)
    term = KLTerm(1.0, estimator, "reward", per="token")
    return reward_to_go(term.of_tokens(logps, reference, mask), mask, term.gamma)


def policy_gradient(world: World, advantages: Tensor, push: object) -> Tensor:
    objective = Objective("reward", push, token_mean)  # type: ignore[arg-type]

    def expected_loss(logits: Tensor) -> Tensor:
        batch = world.on_policy_batch(logits, advantages if advantages.dim() == 2 else advantages.unsqueeze(1))
        return (world.probabilities.unsqueeze(1) * objective.token_loss(batch)).sum()

    return world.gradient(expected_loss)


# -- what is exact -----------------------------------------------------------------------------------------------------


def test_the_enumeration_is_complete() -> None:
    assert WORLD.probabilities.sum().item() == pytest.approx(1.0, rel=1e-14)
    logps = token_logps(WORLD.policy).sum(1)
    assert WORLD.divergence(WORLD.policy).item() == pytest.approx(
        float((logps.exp() * (logps - token_logps(WORLD.reference).sum(1))).sum()), rel=1e-14
    )
    # chain rule of KL: the divergence of sequences is the expected divergence of next tokens
    assert WORLD.divergence_per_prefix(WORLD.policy).item() == pytest.approx(
        WORLD.divergence(WORLD.policy).item(), rel=1e-12
    )


@pytest.mark.parametrize("push", [Reinforce(), Unclipped(), Clipped()], ids=lambda push: type(push).__name__)
def test_k1_in_the_reward_is_the_true_gradient(push: object) -> None:
    """With every on-policy surrogate: −Σ_t k1_t as the reward of the whole completion."""
    torch.testing.assert_close(in_reward(WORLD, "k1", push), true_gradient(WORLD), **EXACT)


def test_k1_in_the_loss_does_nothing() -> None:
    """E[∇log π] = 0: pure noise."""
    assert in_loss(WORLD, "k1").abs().max().item() < 1e-14


def test_k2_in_the_loss_is_exact_for_each_next_token_and_blind_to_where_it_leads() -> None:
    """Equal to the reverse-KL gradient with the prefixes' probabilities held fixed; not to the sequences' own."""
    torch.testing.assert_close(in_loss(WORLD, "k2"), per_prefix_gradient(WORLD), **EXACT)
    assert 0.1 < relative_error(in_loss(WORLD, "k2"), true_gradient(WORLD)) < 1.0
    assert cosine(in_loss(WORLD, "k2"), true_gradient(WORLD)) > 0.9


def test_what_k2_in_the_loss_leaves_out_is_the_future() -> None:
    """true − k2-in-loss = E[Σ_t ∇log π_t · Σ_{s>t} k1_s]."""
    future = (token_logps(WORLD.policy) - token_logps(WORLD.reference)).flip(1).cumsum(1).flip(1)
    later = torch.cat([future[:, 1:], torch.zeros(len(future), 1, dtype=torch.float64)], dim=1)
    missing = WORLD.gradient(lambda logits: (WORLD.probabilities.unsqueeze(1) * later * token_logps(logits)).sum())
    torch.testing.assert_close(in_loss(WORLD, "k2") + missing, true_gradient(WORLD), **EXACT)


def test_k2_in_the_loss_is_the_true_gradient_where_there_is_no_future_to_leave_out() -> None:
    """Tokens that do not depend on their prefix: the two gradients are one. (Length 1 is the simplest such case.)"""
    torch.testing.assert_close(in_loss(BLIND, "k2"), true_gradient(BLIND), **EXACT)


def test_k2_of_the_whole_sequence_is_the_true_gradient() -> None:
    """½(Σ_t log π − log π_ref)²: Kimi's regulariser. The square is of the sum, not the sum of squares."""
    reference = token_logps(WORLD.reference).sum(1)
    found = WORLD.gradient(
        lambda logits: (WORLD.probabilities * 0.5 * (reference - token_logps(logits).sum(1)).square()).sum()
    )
    torch.testing.assert_close(found, true_gradient(WORLD), **EXACT)


def test_k3_in_the_loss_is_the_forward_kl_of_each_next_token() -> None:
    """(1 − eˣ)∇log π is in expectation −E_{π_ref}[∇log π]: the gradient of KL(π_ref‖π), another divergence."""
    torch.testing.assert_close(in_loss(WORLD, "k3"), per_prefix_gradient(WORLD, forward=True), **EXACT)
    assert relative_error(in_loss(WORLD, "k3"), per_prefix_gradient(WORLD)) > 0.3
    assert cosine(in_loss(WORLD, "k3"), true_gradient(WORLD)) < cosine(in_loss(WORLD, "k2"), true_gradient(WORLD))


def test_trls_ratio_weighted_k3_is_k2_pointwise() -> None:
    """On-policy ∇(ρ·k3) = −x∇log π = ∇k2 for every single token, not only in expectation."""
    gradients = []
    for term in (KLTerm(1.0, "k3", ratio_weighted=True), KLTerm(1.0, "k2")):
        logits = WORLD.policy.clone().requires_grad_()
        batch = WORLD.on_policy_batch(logits)
        gradients.append(torch.autograd.grad(term.in_loss(batch).sum(), batch.logps)[0])
    torch.testing.assert_close(*gradients, **EXACT)
    torch.testing.assert_close(in_loss(WORLD, "k3", ratio_weighted=True), in_loss(WORLD, "k2"), **EXACT)


def test_ratio_weighting_repairs_k1_too() -> None:
    """∇(ρ·k1) = (k1 + 1)∇log π: k2's gradient in expectation, with more noise."""
    torch.testing.assert_close(in_loss(WORLD, "k1", ratio_weighted=True), in_loss(WORLD, "k2"), **EXACT)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_loss_and_the_reward_gradient_together_differentiate_the_expected_value(estimator: str) -> None:
    """∇E[k] = E[k·∇log π] + E[∇k]: the reward placement is the first half only, so k2 and k3 there are biased."""
    reference = token_logps(WORLD.reference)
    value = KLTerm(1.0, estimator).in_loss

    def expected_value(logits: Tensor) -> Tensor:
        batch = WORLD.on_policy_batch(logits)
        return (token_logps(logits).sum(1).exp() * value(batch).sum(1)).sum()

    whole = WORLD.gradient(expected_value)
    torch.testing.assert_close(in_reward(WORLD, estimator) + in_loss(WORLD, estimator), whole, **EXACT)
    assert reference.shape == (64, 3)
    if estimator == "k3":  # unbiased as a value, so the whole of it is the true gradient
        torch.testing.assert_close(whole, true_gradient(WORLD), **EXACT)
    assert relative_error(in_reward(WORLD, estimator), true_gradient(WORLD)) > 0.3


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_values(estimator: str, unbiased: bool) -> None:
    found, true = expected_value_of(WORLD, estimator), WORLD.divergence(WORLD.policy).item()
    assert math.isclose(found, true, rel_tol=1e-12) is unbiased


def expected_value_of(world: World, estimator: str) -> float:
    logps, reference = token_logps(world.policy), token_logps(world.reference)
    values = KLTerm(1.0, estimator).in_reward(logps, reference, torch.ones_like(logps, dtype=torch.bool))
    return float((world.probabilities * values).sum())


def test_noise_of_k3_with_the_ratio_is_that_of_k2_and_k1_in_the_reward_pays_for_being_exact() -> None:
    assert noise(WORLD, "k3", "loss", True) == pytest.approx(noise(WORLD, "k2", "loss", False), rel=1e-12)
    assert noise(WORLD, "k1", "reward", False) > noise(WORLD, "k2", "loss", False)


def test_a_baseline_of_the_group_keeps_k1_in_the_reward_exact() -> None:
    """G = 2, all 4,096 pairs of sequences: leave-one-out is exact, the group mean exact up to (G − 1)/G = ½."""
    logps, reference = token_logps(WORLD.policy), token_logps(WORLD.reference)
    rewards = (reference - logps).sum(1)
    pairs = torch.tensor(list(itertools.product(range(64), repeat=2)))
    for rule, factor in ((LeaveOneOut(), 1.0), (GroupMean(), 0.5)):
        advantages = rule(rewards[pairs].flatten(), 2).view(-1, 2)
        chance = WORLD.probabilities[pairs].prod(1)

        def expected_loss(logits: Tensor, advantages: Tensor = advantages, chance: Tensor = chance) -> Tensor:
            score = token_logps(logits).sum(1)[pairs]
            return -(chance.unsqueeze(1) * advantages * score).sum() / 2

        torch.testing.assert_close(WORLD.gradient(expected_loss), factor * true_gradient(WORLD), **EXACT)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_per_token_in_the_reward_has_the_gradient_of_the_sum(estimator: str) -> None:
    """What lies before a token is no consequence of it: charging for what follows alone changes nothing but the
    noise."""
    torch.testing.assert_close(per_token_in_reward(WORLD, estimator), in_reward(WORLD, estimator), **EXACT)


def test_per_token_has_less_noise() -> None:
    worlds = [World(random_logits(2 * seed), random_logits(2 * seed + 1)) for seed in range(5)]
    per = {place: [noise(world, "k1", place, False) for world in worlds] for place in ("reward", "token")}
    assert sum(per["token"]) < 0.9 * sum(per["reward"])


def test_the_clamped_estimator_is_biased() -> None:
    assert relative_error(per_token_in_reward(WORLD, "k1_clamped"), true_gradient(WORLD)) > 0.1


def test_the_comparison_can_fail() -> None:
    assert relative_error(-in_reward(WORLD, "k1"), true_gradient(WORLD)) == pytest.approx(2.0)


# -- the table ---------------------------------------------------------------------------------------------------------


WHAT = {
    ("k1", "loss"): "0 in expectation: noise and nothing else",
    ("k2", "loss"): "reverse KL of each next token, exactly; blind to the future",
    ("k3", "loss"): "*forward* KL(π_ref‖π) of each next token, exactly",
    ("ρ·k1", "loss"): "k2's gradient in expectation, with more noise",
    ("ρ·k3", "loss"): "k2's gradient, token by token (TRL's default)",
    ("k1", "reward"): "**the true gradient, exactly**",
    ("k2", "reward"): "biased: the first half of ∇E[k2]",
    ("k3", "reward"): "biased: ∇KL minus k3-in-loss",
}


def noise(world: World, estimator: str, placement: str, ratio_weighted: bool) -> float:
    """√E‖g − E g‖² of one sampled completion's gradient g, as a multiple of the true gradient's length."""
    logits = world.policy.clone().requires_grad_()
    batch = world.on_policy_batch(logits)
    assert batch.ref_logps is not None
    if placement == "loss":
        each = KLTerm(1.0, estimator, ratio_weighted=ratio_weighted).in_loss(batch)
        (push,) = torch.autograd.grad(each.sum(), batch.logps)  # [64, 3]: what multiplies ∇log π of each token
    elif placement == "token":
        push = to_go(world, estimator)
    else:
        total = KLTerm(1.0, estimator, "reward").in_reward(batch.logps, batch.ref_logps, batch.mask)
        push = total.unsqueeze(1).expand(batch.mask.shape)
    score = torch.zeros(*SEQUENCES.shape, *logits.shape, dtype=torch.float64)
    row, token = torch.arange(64).unsqueeze(1).expand(64, 3), torch.arange(3).expand(64, 3)
    score[row, token, PREFIX_OF] = -logits.detach().softmax(-1)[PREFIX_OF]
    score[row, token, PREFIX_OF, SEQUENCES] += 1  # ∇log softmax = one-hot − softmax
    sampled = (push[..., None, None] * score).sum(1).flatten(1)
    chance = world.probabilities
    mean = chance @ sampled
    return float((chance @ (sampled - mean).square().sum(1)).sqrt() / true_gradient(world).norm())


def table(worlds: int = 20) -> str:
    """Markdown: means over ``worlds`` random policies and references; every figure is an exact expectation."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {key: [] for key in WHAT}
    for seed in range(worlds):
        world = World(random_logits(2 * seed), random_logits(2 * seed + 1))
        true, next_token = true_gradient(world), per_prefix_gradient(world)
        for name, placement in WHAT:
            estimator = name.removeprefix("ρ·")
            weighted = name != estimator
            gradient = in_reward(world, estimator) if placement == "reward" else in_loss(world, estimator, weighted)
            errors = relative_error(gradient, true), relative_error(gradient, next_token)
            found[name, placement].append(
                (cosine(gradient, true), *errors, noise(world, estimator, placement, weighted))
            )
    lines = [
        "| estimator | placement | cosine | error | error, next token | noise | on-policy gradient |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, placement), rows in found.items():
        angle, error, local, spread = (sum(column) / len(rows) for column in zip(*rows))
        cells = ["–" if math.isnan(angle) else f"{angle:.3f}", figure(error), figure(local), f"{spread:.2f}"]
        lines.append(f"| {name} | {placement} | {' | '.join(cells)} | {WHAT[name, placement]} |")
    return "\n".join(lines)


def figure(value: float) -> str:
    return "0" if value < 1e-12 else f"{value:.3f}"


MARKS = ("<!-- table: tests/reference/test_kl_gradients.py -->", "<!-- end of table -->")


@pytest.mark.not_fast
def test_the_page_shows_the_measured_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(f"{re.escape(MARKS[0])}\n(.*?)\n{re.escape(MARKS[1])}", text, re.DOTALL)
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
