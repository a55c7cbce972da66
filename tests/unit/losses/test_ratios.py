"""Importance ratios of the policy against its older self. (Against the sampler: conformance/test_corrections.py.)"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.objectives import (
    RATIO_LEVELS,
    Clipped,
    Objective,
    Unclipped,
    literal_log_ratios,
    log_ratio,
    sequence_mean,
)

NEW = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.5, math.nan]], dtype=torch.float64)
OLD = torch.tensor([[-1.5, -2.0, -9.0], [-0.25, -1.0, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, False]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # −1 + 1.5, −2 + 2, masked; −0.5 + 0.25, −0.5 + 1, masked
        ("token", [[0.5, 0.0, 0.0], [-0.25, 0.5, 0.0]]),
        # the mean over the tokens that carry loss: the geometric mean of the token ratios (GSPO eq. 7)
        ("sequence", [[0.25], [0.125]]),
        # the sum over them: Π ρ_t = e^(0.5 + 0) and e^(−0.25 + 0.5)
        ("product", [[0.5], [0.25]]),
        # the row's 0.25 and 0.125 at each of its tokens; 0 where masked
        ("sequence_token", [[0.25, 0.25, 0.0], [0.125, 0.125, 0.0]]),
    ],
)
def test_hand_values_also_written_out_over_single_floats(level: str, expected: list[list[float]]) -> None:
    found = log_ratio(level, NEW, OLD, MASK)
    assert found.tolist() == expected
    for row, steps in zip(found.expand(2, 3), ([0.5, 0.0], [-0.25, 0.5]), strict=True):
        assert row[:2].tolist() == literal_log_ratios(level, steps)
    assert (log_ratio(level, NEW, NEW, MASK) == 0).all()  # on-policy: the same numbers, so 0 exactly


def test_levels_are_a_fixed_list() -> None:
    assert set(RATIO_LEVELS) == {"token", "sequence", "product", "sequence_token"}
    with pytest.raises(ValueError, match=r"`ratio` is 'row'; it must be one of \('token', 'sequence', "):
        log_ratio("row", NEW, OLD, MASK)


def test_gspo_tokens_move_their_own_ratio_only() -> None:
    """d e^0.25 of token (0, 1) by its own log-prob is e^0.25 · 1; by its neighbour's 0 (of a geometric mean ½ each)."""
    logps = NEW.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_ratio("sequence_token", logps, OLD, MASK)[0, 1].exp(), logps)
    assert gradient[0].tolist() == [0.0, pytest.approx(math.exp(0.25), rel=1e-15), 0.0]


def _batch(ratio: str, advantages: torch.Tensor) -> TokenBatch:
    draw = torch.Generator().manual_seed(0)
    logps = (-torch.rand(4, 6, generator=draw, dtype=torch.float64) * 3).requires_grad_()
    old = logps.detach() + 0.4 * torch.randn(4, 6, generator=draw, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3]).unsqueeze(1)
    return TokenBatch(logps, old, log_ratio(ratio, logps, old, mask), advantages, mask)


@pytest.mark.parametrize("push", [Unclipped(), Clipped(0.05), Clipped(0.05, 0.1, 1.2)], ids=str)
def test_gspo_token_with_one_advantage_a_row_is_gspo(push: Any) -> None:
    """arXiv 2507.18071 §4.3: the same value and gradient; they differ in the order of float64 additions only."""
    advantages = torch.randn(4, 1, generator=torch.Generator().manual_seed(100), dtype=torch.float64)
    found = []
    for level, spread in (("sequence", advantages), ("sequence_token", advantages.expand(4, 6))):
        batch = _batch(level, spread)
        loss = Objective("x", push, sequence_mean, level).loss(batch, Denominators(4.0, 14.0, 6.0))
        found.append((loss.item(), torch.autograd.grad(loss, batch.logps)[0]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-14)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-13, atol=1e-16)


def test_gspo_token_takes_advantages_per_token() -> None:
    """Where the advantage is 0 a token gets nothing, although it is part of the row's ratio: not so with `sequence`."""
    advantages = torch.zeros(4, 6, dtype=torch.float64)
    advantages[0, 2] = 1.5
    for level, moved in (("sequence_token", 1), ("sequence", 6)):
        batch = _batch(level, advantages)
        (gradient,) = torch.autograd.grad(Unclipped()(batch).expand(4, 6)[batch.mask].sum(), batch.logps)
        assert int((gradient != 0).sum()) == moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_long_product_is_held_in_log_space_and_never_no_number(dtype: torch.dtype, sign: float) -> None:
    """4,000 tokens that each gained half a nat: e^2000 is no number. It is held at e^40 without a gradient; e^−2000 is
    0."""
    old = torch.full((2, 4000), -1.0, dtype=dtype)
    logps = (old + torch.tensor([[0.5], [-0.5]], dtype=dtype)).requires_grad_()
    mask = torch.ones(2, 4000, dtype=torch.bool)
    held = log_ratio("product", logps, old, mask)
    assert held.flatten().tolist() == [40.0, -2000.0]
    assert literal_log_ratios("product", [0.5] * 4000)[0] == 40.0
    batch = TokenBatch(logps, old, held, torch.full((2, 1), sign, dtype=dtype), mask)
    for push in (Unclipped(), Clipped(0.2)):
        loss = Objective("x", push, sequence_mean, "product").loss(batch, Denominators(2.0, 8000.0, 4000.0))
        (gradient,) = torch.autograd.grad(loss, logps, retain_graph=True)
        assert loss.isfinite()
        assert (gradient == 0).all()
        said = Objective("x", push, sequence_mean, "product").diagnostics(batch)["product_ratio/held_mean"]
        assert said.flatten().tolist() == [True, False]
