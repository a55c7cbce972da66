"""Aggregations: hand values. Shared properties: ``tests/conformance/test_aggregation_rows.py``."""

from __future__ import annotations

import pytest
import torch

from grpo_lab.batch import Denominators
from grpo_lab.objectives import Aggregation, aggregation, fixed_budget, local_token_mean, sequence_mean, token_mean

LOSS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 99.0, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])
WHOLE = Denominators(rows=2.0, tokens=6.0, budget=8.0, micro_batches=1.0)
"""The optimizer step is these two rows: 4 + 2 tokens."""


@pytest.mark.parametrize(
    ("aggregate", "value", "long", "short"),
    [
        # ((1 + 2 + 3 + 4)/4 + (10 + 20)/2)/2; a token of the long row counts half as much: length bias
        (sequence_mean, 8.75, 1 / 8, 1 / 4),
        (token_mean, 40 / 6, 1 / 6, 1 / 6),  # (10 + 30)/6
        (local_token_mean, 40 / 6, 1 / 6, 1 / 6),  # the micro-batch is the step
        (fixed_budget, 2.5, 1 / 16, 1 / 16),  # 40/(2 · 8): the lengths do not enter
    ],
)
def test_hand_values_and_what_one_token_counts(aggregate: Aggregation, value: float, long: float, short: float) -> None:
    loss = LOSS.clone().requires_grad_()
    found = aggregate(loss, MASK, WHOLE)
    assert found.item() == pytest.approx(value, rel=1e-15)
    (weight,) = torch.autograd.grad(found, loss)
    assert weight.flatten().tolist() == pytest.approx([long] * 4 + [short] * 2 + [0.0] * 2, rel=1e-15)


def test_local_token_mean_depends_on_the_cut() -> None:
    """By definition (TRL's bnpo): one row a micro-batch gives (10/4 + 30/2)/2 = 8.75, not 40/6; of three micro-batches
    each counts a third."""
    halves = Denominators(rows=2.0, tokens=6.0, budget=8.0, micro_batches=2.0)
    apart = sum(local_token_mean(LOSS[i : i + 1], MASK[i : i + 1], halves).item() for i in range(2))
    assert apart == 8.75
    third = Denominators(rows=6.0, tokens=18.0, budget=8.0, micro_batches=3.0)
    assert local_token_mean(LOSS, MASK, third).item() == pytest.approx(40 / 18, rel=1e-15)


def test_token_counts_of_different_generation_batches_in_one_step() -> None:
    """``tokens`` may be ``[B, 1]``: 10/5 + 30/10 = 5."""
    mixed = Denominators(rows=2.0, tokens=torch.tensor([[5.0], [10.0]]), budget=8.0)
    assert token_mean(LOSS, MASK, mixed).item() == pytest.approx(5.0, rel=1e-15)


def test_by_name() -> None:
    assert aggregation("fixed_budget") is fixed_budget
    with pytest.raises(ValueError, match=r"`aggregation` is 'mean'; it must be one of .*fixed_budget"):
        aggregation("mean")
