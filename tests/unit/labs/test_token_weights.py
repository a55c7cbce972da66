"""``grpo_lab.diagnostics.token_weights``: what differentiating the loss gives, against the papers' formulas."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.advantages import advantage_rule
from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.diagnostics.token_weights import (
    BUCKETS,
    COLUMNS,
    FAMILIES,
    WeightFamily,
    as_line,
    over_steps,
    sums_of_rows,
    sums_of_weights,
    token_weights,
)
from grpo_lab.objectives import PRESETS, Objective, aggregation, log_ratio, preset, surrogate
from reference.cases import SELECTIONS

LENGTHS = [3, 1, 7, 2, 5, 4, 6, 2, 1, 7, 3, 3, 2, 4, 1, 5, 6, 2, 3, 4]
GROUPS = [
    [1.0, 0.0, 0.0, 0.0],
    [1.0, 1.0, 0.0, 1.0],
    [1.0, 1.0, 1.0, 1.0],  # dead
    [0.1, 0.1, 0.1, 0.1],  # dead, and 0.1 has no exact mean
    [0.5, 0.5, 0.5, 0.5009765625],  # nearly dead: σ is 4.9e-4 beside an ε of 1e-4
]
COUNTS = Denominators(rows=20.0, tokens=float(sum(LENGTHS)), budget=16.0, micro_batches=1.0)
EXACT = {"rtol": 1e-12, "atol": 1e-15}
"""float64; rewards are exact in it, and a weight is one product."""


def advantages_by_hand(name: str) -> list[float]:
    """(r − r̄)/(σ + 1e-4), σ with G − 1 (nano-aha-moment: with G), or r − r̄."""
    found = []
    for group in GROUPS:
        mean = statistics.fmean(group)
        spread = statistics.pstdev(group) if name == "reinforce_token_mean" else statistics.stdev(group)
        dead = len(set(group)) == 1
        found += [0.0 if dead else (r - mean) / (spread + 1e-4 if FAMILIES[name].scaled else 1.0) for r in group]
    return found


BY_HAND = {
    "grpo": lambda a, n: a / n / 20,  # 1/rows · 1/|o|
    "gspo": lambda a, n: a / n / 20,  # the response's ratio, ^1/|o|, |o| times, averaged by |o|
    "dapo": lambda a, n: a / sum(LENGTHS),
    "bnpo": lambda a, n: a / sum(LENGTHS),
    "cispo": lambda a, n: a / sum(LENGTHS),
    "reinforce_token_mean": lambda a, n: a / sum(LENGTHS),
    "dr_grpo": lambda a, n: a / (20 * 16),
    "reinforce": lambda a, n: a / (20 * 16),
    "dppo_tv": lambda a, n: a / (20 * 16),
    "dppo_kl": lambda a, n: a / (20 * 16),
    "mirror_descent": lambda a, n: a / 20,
    "gspo_token": lambda a, n: a / n / 20,
    "gmpo": lambda a, n: a / n / 20,
    "sapo": lambda a, n: a / n / 20,
    "luspo": lambda a, n: a / 20,
    **dict.fromkeys(("prime_rl", "clip_cov", "kl_cov"), lambda a, n: a / sum(LENGTHS)),
}


def objective_of(name: str, **changes: str) -> Objective:
    row = preset(name)
    return Objective(
        name, surrogate(row.surrogate), aggregation(changes.get("aggregation", row.aggregation)),
        ratio=changes.get("ratio", row.ratio),
    )  # fmt: skip


def rule_of(name: str) -> Any:
    return advantage_rule(preset(name).advantage, **preset(name).knobs)


def batch_of(objective: Objective, advantages: Tensor, lengths: list[int] = LENGTHS, moved: float = 0.0) -> TokenBatch:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    logps = -1.5 + torch.sin(torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape))
    logps = logps.masked_fill(~mask, math.nan).requires_grad_()  # what stands on padding is nobody's
    old = logps.detach() - moved
    return TokenBatch(
        logps, old, log_ratio(objective.ratio, logps, old, mask), advantages.unsqueeze(1), mask,
        chosen=dict.fromkeys(SELECTIONS, torch.zeros_like(mask)),
    )  # fmt: skip


def weights_of(name: str, advantages: Tensor | None = None, **changes: str) -> tuple[Tensor, TokenBatch]:
    if advantages is None:
        rewards = torch.tensor(GROUPS, dtype=torch.float64).flatten()
        advantages = rule_of(name)(rewards, 4)
    objective = objective_of(name, **changes)
    batch = batch_of(objective, advantages)
    return token_weights(objective.loss(batch, COUNTS), batch.logps), batch


def test_every_preset_has_a_family_but_that_of_a_critic() -> None:
    """Nor those whose advantage goes with the pass rate or the length in another way."""
    others = {"ppo", "maxrl", "pass_at_k", "gdpo", "opo", "reinforce_pp_baseline", "scale_rl", "vespo"}
    assert FAMILIES.keys() == PRESETS.keys() - others == BY_HAND.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_the_formulas(name: str) -> None:
    """On a ragged batch with dead and nearly dead groups: Â·|o|^(α−1)/D, a number for every token."""
    found, batch = weights_of(name)
    each = [BY_HAND[name](a, n) for a, n in zip(advantages_by_hand(name), LENGTHS, strict=True)]
    expected = torch.tensor(each, dtype=torch.float64).unsqueeze(1).expand(batch.mask.shape).masked_fill(~batch.mask, 0)

    torch.testing.assert_close(found, expected, **EXACT)
    assert (found[8:16] == 0).all()  # dead groups weigh nothing at all
    assert (found[16:] != 0)[batch.mask[16:]].all()


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_follow_their_family_over_lengths(name: str) -> None:
    """Of equal advantages: w(L)/w(1) = L^(α−1); Σ over the answer: L^α."""
    found, _ = weights_of(name, torch.ones(20, dtype=torch.float64))
    one = found[LENGTHS.index(1), 0].item()
    for row, tokens in enumerate(LENGTHS):
        assert found[row, 0].item() / one == pytest.approx(FAMILIES[name].of_length(tokens), rel=1e-12)
        assert found[row].sum().item() / one == pytest.approx(tokens ** FAMILIES[name].alpha, rel=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("right", [1, 2, 5, 7])
def test_groups_weigh_by_their_pass_rate(name: str, right: int) -> None:
    """G = 8. 2p(1 − p), or 2√(p(1 − p)) times √(7/8) for σ with G − 1, in which ε = 1e-4 is one part in 3,000."""
    rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
    size = rule_of(name)(rewards, 8).abs().mean().item()
    sample = FAMILIES[name].scaled and name != "reinforce_token_mean"
    assert size == pytest.approx(FAMILIES[name].of_pass_rate(right / 8) * (math.sqrt(7 / 8) if sample else 1), rel=4e-4)


def test_pass_rates_by_hand() -> None:
    assert WeightFamily(1, scaled=False).of_pass_rate(0.25) == 0.375  # 2 · ¼ · ¾
    assert WeightFamily(0, scaled=True).of_pass_rate(0.5) == 1.0  # 2 · √¼
    unbiased = ["dr_grpo", "reinforce", "mirror_descent", "dppo_tv", "dppo_kl", "prime_rl"]
    assert [name for name, family in FAMILIES.items() if family.unbiased] == unbiased


def test_the_plain_product_of_ratios_makes_grpo_weigh_every_token_alike() -> None:
    """∂Π_s ρ_s/∂log π_t = 1 on-policy: the row's loss, averaged over its |o| tokens, has no 1/|o| left."""
    found, batch = weights_of("grpo", torch.ones(20, dtype=torch.float64), ratio="product")
    assert found[batch.mask].tolist() == pytest.approx([1 / 20] * sum(LENGTHS), rel=1e-12)


def test_off_policy_the_clip_is_seen() -> None:
    """ρ = e^0.5 > 1.2 with a positive advantage: GRPO's clip takes the gradient, and a negative one keeps ρ·Â."""
    objective = objective_of("grpo")
    batch = batch_of(objective, torch.tensor([1.0, -1.0], dtype=torch.float64), [2, 2], moved=0.5)
    found = token_weights(objective.loss(batch, replace(COUNTS, rows=2.0)), batch.logps)
    assert found[0].tolist() == [0.0, 0.0]
    assert found[1].tolist() == pytest.approx([-math.exp(0.5) / 4] * 2, rel=1e-12)


def test_a_team_s_token_loss_is_seen_and_the_loss_can_still_be_trained_on() -> None:
    """The first token twice: half of the rest; log-probs that are not a leaf."""
    raw = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    logps = raw.log_softmax(-1)
    loss = -(logps * torch.tensor([2.0, 1.0, 1.0])).sum()
    assert token_weights(loss, logps).tolist() == [[2.0, 1.0, 1.0]]
    loss.backward()
    assert raw.grad is not None
    assert token_weights((raw * 2).sum(), logps).tolist() == [[0.0, 0.0, 0.0]]  # not read at all


def test_sums_by_hand() -> None:
    """Three rows of 2, 1 and 3 tokens in quarters 0, 0, 3 of groups with pass rates ½, unknown, 1; one without loss."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    advantages = torch.tensor([0.5, -2.0, 1.0, 9.0])
    place = (torch.tensor([0, 0, 3, 1]), torch.tensor([0.5, math.nan, 1.0, 0.5]))
    rows = sums_of_rows(mask, advantages, *place)
    assert rows.shape == (BUCKETS, len(COLUMNS) - 1)
    assert rows[0].tolist() == [2.0, 3.0, 0.5, 2.5, 3.0]  # rows, tokens, Σp, ½ + 2, 2·½ + 2
    assert rows[3].tolist() == [1.0, 3.0, 1.0, 1.0, 3.0]
    assert rows[4 + 2].tolist() == [1.0, 2.0, 0.5, 0.5, 1.0]  # (¼, ½]
    assert rows[4 + 5].tolist() == [1.0, 3.0, 1.0, 1.0, 3.0]  # p = 1
    assert rows[[1, 2, 4, 5, 7, 8]].abs().sum() == 0
    weights = torch.tensor([[0.1, -0.1, 7.0], [0.4, 7.0, 7.0], [0.2, 0.2, 0.2], [7.0, 7.0, 7.0]])
    sums = sums_of_weights(weights.double(), mask, *place)
    assert sums.tolist() == pytest.approx([0.6, 0, 0, 0.6, 0, 0, 0.2, 0, 0, 0.6], rel=1e-6)


@pytest.mark.parametrize(("name", "alpha"), [("grpo", 0), ("dr_grpo", 1)])
def test_a_run_s_buckets_lie_on_the_curve_of_their_objective(name: str, alpha: int) -> None:
    weights, batch = weights_of(name)
    advantages = batch.advantages.squeeze(1)
    quarter = torch.tensor([min(3, (n - 1) // 2) for n in LENGTHS])
    place = (quarter, torch.tensor([0.25, 0.75, 1.0, 1.0, math.nan]).repeat_interleave(4))
    one = torch.cat(
        [sums_of_rows(batch.mask, advantages, *place), sums_of_weights(weights, batch.mask, *place).unsqueeze(1)], dim=1
    )
    lines = [as_line(1, one), as_line(2, 2 * one)]
    for by in ("by_length", "by_pass_rate"):
        for bucket in over_steps(lines, by):
            assert bucket.token == pytest.approx(bucket[3 + alpha], rel=1e-9)
            assert bucket.answer == pytest.approx(bucket[5 + alpha], rel=1e-9)
            other = bucket[3 + 1 - alpha]
            assert bucket.token == 0 or abs(bucket.token / other - 1) > 1e-3  # and on no other
    assert [round(bucket.at, 3) for bucket in over_steps(lines, "by_pass_rate")] == [0.25, 0.75, 1.0]
    assert over_steps(lines, "by_pass_rate")[-1].token == 0  # a dead group
    assert over_steps([], "by_length") == over_steps([as_line(1, 0 * one)], "by_length") == []
