"""Surrogates: hand values and where the gradient is cut. Shared properties:
``tests/conformance/test_surrogate_rows.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import Clipped, DetachedWeight, Reinforce, Unclipped, surrogate, token_log_ratio


def one(ratio: float, advantage: float, logp: float = -1.0) -> TokenBatch:
    """A single token with importance ratio ``ratio``."""
    logps = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    old = (logps - math.log(ratio)).detach()
    mask = torch.ones(1, 1, dtype=torch.bool)
    return TokenBatch(
        logps=logps,
        proximal_logps=old,
        log_ratio=token_log_ratio(logps, old, mask),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        mask=mask,
    )


def value_and_gradient(push: Callable[[TokenBatch], Tensor], batch: TokenBatch) -> tuple[float, float]:
    loss = push(batch)
    if not loss.requires_grad:
        return loss.item(), 0.0
    return loss.item(), torch.autograd.grad(loss.sum(), batch.logps)[0].item()


@pytest.mark.parametrize(
    ("push", "ratio", "advantage", "value", "gradient"),
    [
        (Reinforce(), 7.0, 2.0, 2.0, -2.0),  # −Â·log π = −2·(−1); d/d log π = −Â; the ratio plays no part
        (Unclipped(), 1.5, 2.0, -3.0, -3.0),  # −ρÂ, twice, since dρ/d log π = ρ
        (Clipped(0.2), 1.0, 2.0, -2.0, -2.0),  # on-policy: −Â and −Â
        (Clipped(0.2), 1.1, 2.0, -2.2, -2.2),  # inside the clip: −ρÂ
        (Clipped(0.2), 1.5, 2.0, -2.4, 0.0),  # above, Â > 0: −1.2·2, cut off
        (Clipped(0.2), 0.5, 2.0, -1.0, -1.0),  # below, Â > 0: min(0.5·2, 0.8·2) = 1: pulled back up
        (Clipped(0.2), 1.5, -2.0, 3.0, 3.0),  # above, Â < 0: min(−3, −2.4) = −3: not bounded
        (Clipped(0.2), 0.5, -2.0, 1.6, 0.0),  # below, Â < 0: min(−1, −1.6) = −1.6, cut off
        (Clipped(0.2, 0.28), 1.25, 2.0, -2.5, -2.5),  # DAPO: inside 1.28, where 0.2 would have cut
        (Clipped(0.2, 0.28), 1.5, 2.0, -2.56, 0.0),  # −1.28·2
        (Clipped(0.2, 0.28), 0.5, -2.0, 1.6, 0.0),  # the low end is still 0.8
        (Clipped(0.2, delta=4.0), 3.0, -2.0, 6.0, 6.0),  # below δ = 4: as without
        (Clipped(0.2, delta=4.0), 9.0, -2.0, 8.0, 0.0),  # min(4·−2, 1.2·−2) = −8: bounded
        (Clipped(0.2, delta=4.0), 9.0, 2.0, -2.4, 0.0),  # Â > 0 is clipped at 1.2 anyway
        # CISPO: −w·Â·log π with log π = −1 → w·Â; d/d log π = −w·Â, w a constant: no factor from dρ
        (DetachedWeight(5.0), 3.0, 2.0, 6.0, -6.0),
        (DetachedWeight(5.0), 9.0, 2.0, 10.0, -10.0),  # w is cut at 5, whatever the sign of Â
        (DetachedWeight(5.0), 9.0, -2.0, -10.0, 10.0),
        (DetachedWeight(5.0), 0.1, 2.0, 0.2, -0.2),
    ],
    ids=str,
)
def test_hand_values(push: Any, ratio: float, advantage: float, value: float, gradient: float) -> None:
    assert value_and_gradient(push, one(ratio, advantage)) == pytest.approx((value, gradient), rel=1e-14)


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [
        (0.5, -1.0, {"low"}),
        (0.5, 1.0, set()),
        (1.5, 1.0, {"high"}),
        (1.5, -1.0, set()),
        (1.0, 1.0, set()),
        (5.0, 1.0, {"high"}),
        (5.0, -1.0, {"delta"}),
    ],
)
@pytest.mark.parametrize("delta", [None, 4.0])
def test_clip_share_counts_exactly_the_tokens_without_gradient(
    ratio: float, advantage: float, cut: set[str], delta: float | None
) -> None:
    """δ has a metric of its own: TRL's three count ρ > δ with Â < 0 nowhere, and stay TRL's."""
    push, batch = Clipped(0.2, delta=delta), one(ratio, advantage)
    found = {name.split("/")[1].removesuffix("_mean"): value.item() for name, value in push.diagnostics(batch).items()}
    seen = cut if delta else cut - {"delta"}
    assert {name for name, value in found.items() if value and name != "region"} == seen
    assert found["region"] is bool(seen & {"low", "high"})
    assert (value_and_gradient(push, batch)[1] == 0.0) is bool(seen)


@pytest.mark.parametrize(("ratio", "advantage", "cut"), [(6.0, 1.0, True), (6.0, -1.0, False), (4.0, 1.0, False)])
def test_cispo_clip_share(ratio: float, advantage: float, cut: bool) -> None:
    assert DetachedWeight(5.0).diagnostics(one(ratio, advantage))["cispo_clip_ratio"].item() is cut


def test_by_name_with_its_knobs() -> None:
    assert surrogate("clipped", epsilon=0.2, epsilon_high=0.28, delta=4.0) == Clipped(0.2, 0.28, 4.0)
    assert surrogate("cispo", epsilon=0.2, epsilon_high=5.0).bound == DetachedWeight(5.0).bound == 5.0
    assert surrogate("cispo", epsilon=0.2, epsilon_high=None).bound == 0.2  # TRL's own default, poor as it is
    assert surrogate("reinforce") == Reinforce()
    assert surrogate("unclipped") == Unclipped()
    assert Clipped(0.3).high == 0.3  # without a high end of its own the clip is symmetric


def test_the_door() -> None:
    with pytest.raises(ValueError, match=r"`surrogate` is 'cliped'; it must be one of .*clipped"):
        surrogate("cliped")
    with pytest.raises(ValueError, match=r"`surrogate` .*Reinforce does not take \['delta'\]; it takes no settings"):
        surrogate("reinforce", delta=4.0)
    for low in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"`epsilon` \(low\)"):
            Clipped(low)
    with pytest.raises(ValueError, match=r"`epsilon_high` is -0\.1"):
        Clipped(0.2, -0.1)


@pytest.mark.parametrize("bound", [0.9, 1.28, math.inf])
def test_a_two_sided_bound_within_the_clip_is_refused(bound: float) -> None:
    """Below the clip's end δ takes the place of ε_high for Â > 0, and bounds nothing for Â < 0; an infinite one bounds
    nothing at all."""
    with pytest.raises(
        ValueError, match=rf"`delta` .* is {bound}; it must be a finite number above 1 \+ `epsilon_high` = 1\.28"
    ):
        Clipped(0.2, 0.28, bound)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_would_stop_or_turn_the_gradient_is_refused(bound: float) -> None:
    """A negative bound used to turn every gradient round, a bound of 0 to stop them all, without a word."""
    with pytest.raises(ValueError, match=r"`epsilon_high`.*cispo.*> 0"):
        DetachedWeight(bound)
    with pytest.raises(ValueError, match=r"`delta`.*above 1 \+ `epsilon_high` = 1\.2"):
        Clipped(0.2, delta=bound)
