"""Every advantage rule, and every surrogate × ratio × aggregation × KL, against slow literal float64 loops.

Values *and* gradients (the oracle differentiates by hand). Tolerance 1e-12: float64 sums in another order.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lab.advantages import RULES, advantage_rule, level_of
from grpo_lab.batch import RewardTable, TokenBatch
from grpo_lab.objectives import (
    AGGREGATIONS,
    RATIO_LEVELS,
    SURROGATES,
    ClipCov,
    Clipped,
    DetachedWeight,
    GammaWeight,
    GeometricMean,
    KLCov,
    KLRegion,
    KLTerm,
    MirrorDescent,
    Objective,
    PrimeRL,
    Reinforce,
    SoftGate,
    TotalVariationRegion,
    Unclipped,
)
from reference import oracle
from reference.cases import COUNTS, DENOMINATORS, applied, oracle_rows, random_batch

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
PUSHES = {
    "reinforce": [(Reinforce(), {})],
    "unclipped": [(Unclipped(), {})],
    "clipped": [
        (Clipped(0.2), {"low": 0.2, "high": 0.2}),
        (Clipped(0.2, 0.28), {"low": 0.2, "high": 0.28}),
        (Clipped(0.1, 0.3, 1.5), {"low": 0.1, "high": 0.3, "delta": 1.5}),
    ],
    "mirror_descent": [(MirrorDescent(0.7), {"tau": 0.7}), (MirrorDescent(0.0), {"tau": 0.0})],
    "sapo": [(SoftGate(), {}), (SoftGate(6.0, 3.0), {"neg": 6.0, "pos": 3.0})],
    "vespo": [
        (GammaWeight(), {"pos": (2.0, 3.0), "neg": (3.0, 2.0)}),
        (GammaWeight(0.5, 1.0, 1.5, 0.3), {"pos": (0.5, 1.0), "neg": (1.5, 0.3)}),
    ],
    "cispo": [(DetachedWeight(1.2), {"bound": 1.2}), (DetachedWeight(5.0), {"bound": 5.0})],
    "gmpo": [(GeometricMean(), {"low": 0.4, "high": 0.4}), (GeometricMean(0.1, 0.6), {"low": 0.1, "high": 0.6})],
    "dppo_tv": [
        (TotalVariationRegion(), {"low": 0.15, "high": 0.15}),
        (TotalVariationRegion(0.05, 0.1, 1.3), {"low": 0.05, "high": 0.1, "truncate": 1.3}),
    ],
    "dppo_kl": [(KLRegion(), {"low": 0.05, "high": 0.05}), (KLRegion(0.01, 0.02), {"low": 0.01, "high": 0.02})],
    "prime_rl": [
        (PrimeRL(), {"low": 0.2, "high": 0.2, "kl_tau": 1e-3}),
        (PrimeRL(0.1, kl_tau=0.5), {"low": 0.1, "high": 0.1, "kl_tau": 0.5}),
    ],
    "clip_cov": [(ClipCov(), {"low": 0.2, "high": 0.2})],
    "kl_cov": [(KLCov(), {"coefficient": 1.0}), (KLCov(coefficient=0.3), {"coefficient": 0.3})],
}
KLS = list(itertools.product(["k1", "k2", "k3"], [False, True]))


def test_every_surrogate_is_here() -> None:
    assert PUSHES.keys() == SURROGATES.keys()


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("ratio", RATIO_LEVELS)
@pytest.mark.parametrize("name", sorted(PUSHES))
def test_loss_and_gradient(name: str, ratio: str, aggregation: str) -> None:
    for seed, (push, clip) in enumerate(PUSHES[name]):
        compare_kinds_of_batch(seed, name, push, ratio, aggregation, None, clip)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("ratio", RATIO_LEVELS)
@pytest.mark.parametrize("kl", KLS, ids=str)
def test_with_a_kl(kl: tuple[str, bool], ratio: str, aggregation: str) -> None:
    """Beside one surrogate; ``test_any_shape`` draws among all of them."""
    push, clip = PUSHES["clipped"][1]
    compare_kinds_of_batch(0, "clipped", push, ratio, aggregation, kl, clip)


def compare_kinds_of_batch(seed: int, name: str, push: object, ratio: str, *rest: Any) -> None:
    """Advantages per row and per token; without and with a sampler weight."""
    for per_token, weights in ((False, None), (True, "token"), (False, "sequence")):
        compare(random_batch(seed, ratio=ratio, per_token=per_token, weights=weights), name, push, ratio, *rest)


def compare(
    batch: TokenBatch,
    name: str,
    push: object,
    ratio: str,
    aggregation: str,
    kl: tuple[str, bool] | None,
    clip: dict[str, Any],
) -> None:
    if name == "vespo" and batch.sampler_weights is not None:  # they are factors of its weight
        clip = {**clip, "weights_once": batch.sampler_weights.shape != batch.mask.shape}
    term = None if kl is None else KLTerm(0.3, kl[0], ratio_weighted=kl[1])
    objective = Objective(name, push, AGGREGATIONS[aggregation], ratio, term)  # type: ignore[arg-type]
    loss = objective.loss(batch, DENOMINATORS)
    (gradient,) = torch.autograd.grad(loss, batch.logps)
    value, slopes = oracle.loss_and_gradient(
        oracle_rows(batch),
        surrogate_name=name,
        ratio=ratio,
        aggregation=aggregation,
        denominators=COUNTS,
        beta=0.0 if term is None else term.coefficient,
        estimator="k3" if kl is None else kl[0],
        ratio_weighted=False if kl is None else kl[1],
        **clip,
    )
    assert loss.item() == pytest.approx(value, rel=1e-12, abs=1e-12), (push, kl)
    expected = torch.tensor([slope for row in slopes for slope in row], dtype=torch.float64)
    torch.testing.assert_close(gradient[batch.mask], expected, **TIGHT)
    assert (gradient[~batch.mask] == 0).all()


@pytest.mark.not_fast
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 7),
    width=st.integers(1, 9),
    name=st.sampled_from(sorted(PUSHES)),
    ratio=st.sampled_from(RATIO_LEVELS),
    aggregation=st.sampled_from(sorted(AGGREGATIONS)),
    kl=st.sampled_from([None, *KLS]),
    per_token=st.booleans(),
    spread=st.sampled_from([0.0, 0.05, 0.5, 2.0]),
)
def test_any_shape(
    seed: int,
    rows: int,
    width: int,
    name: str,
    ratio: str,
    aggregation: str,
    kl: tuple[str, bool] | None,
    per_token: bool,
    spread: float,
) -> None:
    batch = random_batch(seed, rows, width, ratio, per_token, "token", empty_row=seed % 2 == 0, spread=spread)
    push, clip = PUSHES[name][seed % len(PUSHES[name])]
    compare(batch, name, push, ratio, aggregation, kl, clip)


STDS: tuple[dict[str, Any], ...] = ({"std": "sample"}, {"std": "population"})
KNOBS_OF: dict[str, tuple[dict[str, Any], ...]] = {
    "group_zscore": STDS,
    "batch_zscore": STDS,
    "gdpo": STDS,
    "pass_at_k": ({"k": 1, "success": 0.1}, {"k": 2, "success": 0.5}, {"k": 3}),
    "reinforce_pp_baseline": (*STDS, {"over": "completions"}),
}


@pytest.mark.parametrize("rule", sorted(RULES))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_advantages(rule: str, data: st.DataObject) -> None:
    """Rewards on a grid of tenths, so that ties and dead groups come up; some unscorable."""
    size = data.draw(st.integers(1, 6))
    one = st.one_of(st.none(), st.integers(-20, 20).map(lambda tenths: tenths / 10))
    rewards = data.draw(st.lists(one, min_size=size, max_size=4 * size).map(lambda r: r[: len(r) // size * size]))
    tensor = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    if rule == "maxrl":
        tensor = tensor.abs()
    if level_of(RULES[rule]) == "table":  # whose weighted sum has float32's resolution
        tensor = tensor.float().double()
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=len(rewards), max_size=len(rewards)))
    known = [None if math.isnan(reward) else reward for reward in tensor.tolist()]
    for knobs in KNOBS_OF.get(rule, ({},)):
        expected = oracle.advantages(rule, known, size, lengths=lengths, **knobs)
        found = applied(advantage_rule(rule, **knobs), tensor, size, torch.tensor(lengths))
        # z-scores divide by std + 1e-4: a dead group's rounding of 1e-17 becomes 1e-13
        assert found.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-11)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gdpo_of_several_rewards(data: st.DataObject) -> None:
    one = st.one_of(st.none(), st.integers(-4, 4).map(lambda tenths: tenths / 10))
    rows = data.draw(st.lists(st.lists(one, min_size=3, max_size=3), min_size=8, max_size=8))
    values = torch.tensor([[math.nan if r is None else r for r in row] for row in rows], dtype=torch.float64)
    found = advantage_rule("gdpo")(RewardTable(values, ("a", "b", "c"), torch.tensor([1.0, 0.5, -2.0]), 4))
    assert found.tolist() == pytest.approx(oracle.gdpo(rows, [1.0, 0.5, -2.0], 4, 1e-4), rel=1e-10, abs=1e-9)


def flipped(batch: TokenBatch) -> Tensor:
    return batch.ratio * batch.advantages


def test_the_comparison_can_fail() -> None:
    """A flipped sign, or a clip that is forgotten, does not pass."""
    for wrong in (flipped, Unclipped()):
        with pytest.raises(AssertionError):
            compare(random_batch(0), "clipped", wrong, "token", "token_mean", None, {"low": 0.2, "high": 0.2})
