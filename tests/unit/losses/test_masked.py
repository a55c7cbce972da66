"""Masking arithmetic: select, don't multiply."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.batch import masked_row_mean, masked_sum, safe

HOSTILE = [math.nan, math.inf, -math.inf]


def test_hand_values() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert masked_sum(values, mask).item() == 1 + 4 + 16
    assert masked_sum(values, mask, dim=-1).tolist() == [5.0, 16.0]
    assert masked_sum(values, mask, dim=0).tolist() == [1.0, 16.0, 4.0]
    assert masked_row_mean(values, mask).tolist() == [2.5, 16.0]  # (1 + 4)/2 and 16/1


def test_a_row_value_is_spread_over_the_tokens() -> None:
    """``[B, 1]`` counts once per selected token: 3·2 + 5·1 = 11."""
    values, mask = torch.tensor([[3.0], [5.0]]), torch.tensor([[True, True], [False, True]])
    assert masked_sum(values, mask).item() == 11.0
    assert masked_row_mean(values, mask).tolist() == [3.0, 5.0]


@pytest.mark.parametrize("bad", HOSTILE)
def test_masked_positions_have_no_value_and_exactly_no_gradient(bad: float) -> None:
    values = torch.tensor([[1.0, bad], [bad, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    total = masked_sum(values, mask) + masked_row_mean(values, mask).sum()
    total.backward()
    assert total.item() == 6.0
    assert values.grad is not None
    assert values.grad.tolist() == [[2.0, 0.0], [0.0, 2.0]]


def test_safe_before_exp_keeps_the_gradient_finite() -> None:
    """exp(1e4) = inf and inf · 0 = NaN in the backward: the input must be replaced *before* exp."""
    values = torch.tensor([[0.0, 1e4]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    masked_sum(safe(values, mask).exp(), mask).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0]]
    assert safe(torch.tensor([[7.0, math.nan]]), mask, fill=-1.0).tolist() == [[7.0, -1.0]]


def test_all_masked_gives_a_differentiable_zero() -> None:
    values = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    total = masked_sum(values, mask) + masked_row_mean(values, mask).sum()
    total.backward()
    assert total.item() == 0.0
    assert values.grad is not None
    assert (values.grad == 0).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), min_size=4, max_size=4), min_size=1, max_size=5)
)
def test_mask_equals_slice(rows: list[list[tuple[float, bool]]]) -> None:
    """Masking gives what plain Python gives on the selected numbers alone (1e-12: float64 sums in another order)."""
    values = torch.tensor([[value for value, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[take for _, take in row] for row in rows])
    chosen = [[value for value, take in row if take] for row in rows]
    scale = 1e-12 * (1 + values.abs().sum().item())
    assert masked_sum(values, mask).item() == pytest.approx(math.fsum(map(math.fsum, chosen)), abs=scale)
    means = [math.fsum(row) / len(row) if row else 0.0 for row in chosen]
    assert masked_row_mean(values, mask).tolist() == pytest.approx(means, abs=scale)
