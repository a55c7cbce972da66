"""Hand values of the trust regions, GMPO and the covariance parts, and how tokens are chosen over ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.batch import SAMPLER_LOGPS, TOKEN_IDS, Denominators, TokenBatch
from grpo_lab.objectives import (
    ClipCov,
    GeometricMean,
    KLCov,
    KLRegion,
    PrimeRL,
    TotalVariationRegion,
    prompt_mean,
    token_log_ratio,
)


def batch_of(logps: list[list[float]], old: list[list[float]], advantages: list[float], **extras: Tensor) -> TokenBatch:
    new, was = (torch.tensor(values, dtype=torch.float64).log() for values in (logps, old))
    mask = torch.ones_like(new, dtype=torch.bool)
    sizes = torch.tensor(advantages, dtype=torch.float64).unsqueeze(1)
    return TokenBatch(new, was, token_log_ratio(new, was, mask), sizes, mask, extras=extras)


@pytest.mark.parametrize(
    ("push", "advantage", "expected"),
    [
        # probabilities 0.5 → 0.6, 0.5 → 0.7, 0.001 → 0.1; ratios 1.2, 1.4, 100; TV 0.1, 0.2, 0.099
        (TotalVariationRegion(), 2.0, [-2.4, 0.0, -200.0]),
        (TotalVariationRegion(), -2.0, [2.4, 2.8, 200.0]),  # outwards is down
        (TotalVariationRegion(0.05, 0.25), 2.0, [-2.4, -2.8, -200.0]),
        (TotalVariationRegion(truncate=10.0), 2.0, [-2.4, 0.0, -20.0]),
        # KL(μ‖π) = ½·ln(5/6) + ½·ln(5/4) = 0.0204; ½·ln(5/7) + ½·ln(5/3) = 0.0872; 0.0998
        (KLRegion(), 2.0, [-2.4, 0.0, 0.0]),
        (PrimeRL(kl_tau=0.5), 2.0, [-2.4 + 0.5 * math.log(1.2) ** 2, None, -200 + 0.5 * math.log(100) ** 2]),
    ],
    ids=str,
)
def test_trust_regions_by_hand(push: Any, advantage: float, expected: list[float | None]) -> None:
    sampled = torch.tensor([[0.5, 0.5, 0.001]], dtype=torch.float64).log()
    batch = batch_of([[0.6, 0.7, 0.1]], [[0.9, 0.9, 0.9]], [advantage], **{SAMPLER_LOGPS: sampled})
    for found, value in zip(push(batch)[0].tolist(), expected, strict=True):
        assert value is None or found == pytest.approx(value, rel=1e-12)


def test_without_an_engine_the_sampler_is_the_proximal_policy() -> None:
    batch = batch_of([[0.6, 0.7]], [[0.5, 0.5]], [2.0])
    assert TotalVariationRegion()(batch).tolist() == [pytest.approx([-2.4, 0.0])]


def test_gmpo_by_hand() -> None:
    """Ratios 2, 1/2, 1.25 with Â = 3: logs ln 2 → 0.4, −ln 2 stays, ln 1.25 stays."""
    batch = batch_of([[0.8, 0.2, 0.5]], [[0.4, 0.4, 0.4]], [3.0])
    mean = (0.4 - math.log(2) + math.log(1.25)) / 3
    assert GeometricMean()(batch).tolist() == [[pytest.approx(-3 * math.exp(mean))]]
    down = replace(batch, advantages=-batch.advantages)
    mean = (math.log(2) - 0.4 + math.log(1.25)) / 3
    assert GeometricMean()(down).tolist() == [[pytest.approx(3 * math.exp(mean))]]
    assert GeometricMean().diagnostics(down)["clip_ratio/low_mean"].tolist() == [[False, True, False]]


def own(values: Tensor) -> Tensor:
    return values


def test_covariance_parts_by_hand() -> None:
    """log π = −1, −3 with Â = ±1: means −2 and 0, covariances 1, −1, −1, 1."""
    batch = batch_of([[math.exp(-1), math.exp(-3)]] * 2, [[0.3, 0.06]] * 2, [1.0, -1.0])
    top = KLCov(share=0.5)
    assert top.select(batch, own).tolist() == [[True, False], [False, True]]
    chosen = replace(batch, chosen={"kl_cov": top.select(batch, own), "clip_cov": top.select(batch, own)})
    ratios = batch.ratio.tolist()
    moved = (batch.logps - batch.proximal_logps).abs().tolist()
    assert top(chosen)[0].tolist() == pytest.approx([-ratios[0][0] + moved[0][0], -ratios[0][1]])
    assert ClipCov()(chosen)[0, 0] == 0.0
    assert ClipCov()(chosen)[0, 1] == -ratios[0][1]
    within = ClipCov(share=1.0, cov_low=0.5, epsilon=0.2, epsilon_high=0.22)
    assert within.select(batch, own).tolist() == [[False, False], [False, True]]  # the clip holds the first: ρ = 1.226
    assert not ClipCov(share=1.0).select(batch, own).any()  # 1 is not above 1


def many(rows: int = 40, width: int = 30) -> TokenBatch:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=random)
    logps = -2 * torch.rand(rows, width, generator=random, dtype=torch.float64) - 0.01
    ids = torch.randint(0, 50, (rows, width), generator=random)
    mask = torch.arange(width) < lengths
    advantages = torch.randn(rows, 1, generator=random, dtype=torch.float64)
    return TokenBatch(logps, logps, torch.zeros_like(logps), advantages, mask, extras={TOKEN_IDS: ids})


def part(batch: TokenBatch, rows: Any, width: int) -> TokenBatch:
    names = ("logps", "proximal_logps", "log_ratio", "mask")
    cut = {name: getattr(batch, name)[rows, :width] for name in names}
    extras = {TOKEN_IDS: batch.extras[TOKEN_IDS][rows, :width]}
    return replace(batch, **cut, advantages=batch.advantages[rows], extras=extras)


@pytest.mark.parametrize("push", [KLCov(share=0.02), ClipCov(share=0.01, cov_low=0.1)], ids=str)
def test_a_choice_is_the_same_on_any_ranks_and_moves_no_random_state(push: Any) -> None:
    batch, state = many(), torch.get_rng_state()
    whole = push.select(batch, own)
    assert whole.sum() == int(push.share * batch.mask.sum())
    assert not (whole & ~batch.mask).any()
    assert torch.equal(torch.get_rng_state(), state)
    order = torch.tensor([*range(39, -1, -1)])
    assert torch.equal(push.select(part(batch, order, 30), own), whole[order])
    first, second = (ranks_of(push, batch, slice(0, 25), slice(25, 40), at) for at in (0, 1))
    assert torch.equal(torch.cat([first, second]), whole)
    wide = {name: torch.nn.functional.pad(getattr(batch, name), (0, 3)) for name in ("logps", "log_ratio", "mask")}
    ids = torch.nn.functional.pad(batch.extras[TOKEN_IDS], (0, 3), value=7)
    padded = replace(batch, **wide, proximal_logps=wide["logps"], extras={TOKEN_IDS: ids})
    assert torch.equal(push.select(padded, own)[:, :30], whole)


def ranks_of(push: Any, batch: TokenBatch, one: slice, other: slice, at: int) -> Tensor:
    """What rank ``at`` of two chooses: run both, each gather answered from what the other brought in its own run."""
    parts = [part(batch, one, 30), part(batch, other, 30)]
    brought: list[list[Tensor]] = [[], []]

    def gather_of(rank: int) -> Any:
        calls = iter(range(100))

        def gather(values: Tensor) -> Tensor:
            call = next(calls)
            if len(brought[rank]) == call:
                brought[rank].append(values)
            theirs = brought[1 - rank]
            both = [values, theirs[call]] if len(theirs) > call else [values]
            return torch.cat(both if rank == 0 else both[::-1])

        return gather

    for _ in range(6):  # a round more of gathers is right in each
        for rank in (0, 1):
            brought[rank] = []
            found = push.select(parts[rank], gather_of(rank))
            if rank == at:
                result = found
    return result


def test_equal_tokens_are_chosen_by_the_draw() -> None:
    """All covariances are 0: as many tokens as the share says, of other completions in another batch."""
    batch = replace(many(), advantages=torch.zeros(40, 1, dtype=torch.float64))
    chosen = KLCov(share=0.01).select(batch, own)
    assert chosen.sum() == int(0.01 * batch.mask.sum())
    other = replace(batch, extras={TOKEN_IDS: batch.extras[TOKEN_IDS] + 1})
    assert not torch.equal(KLCov(share=0.01).select(other, own), chosen)


def test_prompt_mean_by_hand() -> None:
    """Two prompts of two completions: 3 + 1 and 2 + 2 tokens."""
    loss = torch.tensor([[1.0, 2.0, 3.0], [6.0, 9.0, 9.0], [1.0, 1.0, 9.0], [4.0, 2.0, 9.0]])
    mask = torch.arange(3) < torch.tensor([[3], [1], [2], [2]])
    counts = Denominators(4.0, 8.0, 3.0, prompts=2.0, group_tokens=torch.tensor([[4], [4], [4], [4]]))
    assert prompt_mean(loss, mask, counts).item() == pytest.approx(((1 + 2 + 3 + 6) / 4 + (1 + 1 + 4 + 2) / 4) / 2)
    uneven = replace(counts, group_tokens=torch.tensor([[4], [4], [8], [0]]))  # 0: all of them are masked
    assert prompt_mean(loss, mask, uneven).item() == pytest.approx((12 / 4 + 2 / 8 + 6 / 1) / 2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TotalVariationRegion(-0.1), "`objective.threshold_low` is -0.1"),
        (lambda: KLRegion(0.1, math.inf), "`objective.threshold_high` is inf"),
        (lambda: KLRegion(truncate=0.5), "`objective.truncate` is 0.5"),
        (lambda: PrimeRL(kl_tau=-1.0), "`objective.kl_tau` is -1.0"),
        (lambda: GeometricMean(clip_high=-0.4), "`objective.clip_high` is -0.4"),
        (lambda: ClipCov(share=0.0), "`objective.share` is 0.0"),
        (lambda: ClipCov(cov_low=5.0), "`objective.cov_low` is 5.0"),
        (lambda: ClipCov(epsilon=2.0), "`epsilon`"),
        (lambda: KLCov(share=1.5), "`objective.share` is 1.5"),
        (lambda: KLCov(coefficient=-1.0), "`objective.coefficient` is -1.0"),
    ],
)
def test_a_knob_out_of_range_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
