"""What every aggregation must do. A new one costs one row in ``ROWS``."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from grpo_lab.batch import Denominators
from grpo_lab.objectives import AGGREGATIONS, Aggregation, aggregation
from reference import oracle
from reference.cases import COUNTS, DENOMINATORS, random_batch
from tolerance import sum_gap


@dataclass(frozen=True)
class Row:
    """What is true of one aggregation.

    Args:
        cut_matters: the value depends on how rows are cut into micro-batches (so it is never re-binned).
        equal_tokens: every token of the batch counts the same, whatever the length of its completion.
        reads: the denominators that it divides by.
    """

    cut_matters: bool = False
    equal_tokens: bool = True
    reads: tuple[str, ...] = ()


ROWS: dict[str, Row] = {
    "sequence_mean": Row(equal_tokens=False, reads=("rows",)),
    "token_mean": Row(reads=("tokens",)),
    "local_token_mean": Row(cut_matters=True, reads=("micro_batches",)),
    "fixed_budget": Row(reads=("rows", "budget")),
    "sequence_sum": Row(reads=("rows",)),
    "prompt_mean": Row(reads=("prompts", "group_tokens")),
}


def test_every_aggregation_has_a_row() -> None:
    assert ROWS.keys() == AGGREGATIONS.keys()


@pytest.fixture(params=sorted(ROWS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def aggregate(name: str) -> Aggregation:
    return aggregation(name)


@pytest.fixture
def row(name: str) -> Row:
    return ROWS[name]


def case(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A per-token loss and a mask with holes, its last row without any loss token."""
    batch = random_batch(seed)
    return batch.logps.detach().clone().requires_grad_(), batch.mask


def weights(aggregate: Aggregation, loss: Tensor, mask: Tensor, denominators: Denominators = DENOMINATORS) -> Tensor:
    return torch.autograd.grad(aggregate(loss, mask, denominators), loss)[0]


def test_agrees_with_the_oracle(name: str, aggregate: Aggregation) -> None:
    loss, mask = case()
    total = int(mask.sum())
    expected = math.fsum(
        oracle.token_weight(name, len(row), total, COUNTS) * value
        for row in ([v for v, take in zip(*pair) if take] for pair in zip(loss.tolist(), mask.tolist()))
        for value in row
    )
    assert aggregate(loss, mask, DENOMINATORS).item() == pytest.approx(expected, rel=1e-12)


def test_gives_a_scalar_of_the_losss_kind(aggregate: Aggregation) -> None:
    loss, mask = case()
    for dtype in (torch.float32, torch.float64):
        found = aggregate(loss.to(dtype), mask, DENOMINATORS)
        assert found.shape == ()
        assert found.dtype == dtype


def test_gradcheck(aggregate: Aggregation) -> None:
    loss, mask = case()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, DENOMINATORS), loss)


def test_linear_in_the_loss(aggregate: Aggregation) -> None:
    (first, mask), (second, _) = case(0), case(1)
    both = aggregate(3 * first - second, mask, DENOMINATORS)
    apart = 3 * aggregate(first, mask, DENOMINATORS) - aggregate(second, mask, DENOMINATORS)
    torch.testing.assert_close(both, apart, rtol=1e-12, atol=1e-14)


def test_weights_are_positive_where_selected_and_exactly_zero_elsewhere(aggregate: Aggregation) -> None:
    loss, mask = case()
    found = weights(aggregate, loss, mask)
    assert (found[mask] > 0).all()
    assert (found[~mask] == 0).all()


@pytest.mark.parametrize("fill", [0.0, math.nan, math.inf, -math.inf])
def test_masked_positions_and_padding_may_hold_anything(aggregate: Aggregation, fill: float) -> None:
    loss, mask = case()
    clean = aggregate(loss, mask, DENOMINATORS).item()
    dirty = torch.cat([loss.detach().masked_fill(~mask, fill), torch.full((5, 3), fill)], dim=1).requires_grad_()
    wide = torch.cat([mask, torch.zeros(5, 3, dtype=torch.bool)], dim=1)
    assert aggregate(dirty, wide, DENOMINATORS).item() == pytest.approx(clean, rel=1e-13)
    torch.testing.assert_close(weights(aggregate, dirty, wide)[:, :-3], weights(aggregate, loss, mask), rtol=0, atol=0)


def test_all_masked_is_a_differentiable_zero(aggregate: Aggregation) -> None:
    loss = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert aggregate(loss, mask, DENOMINATORS).item() == 0.0
    assert (weights(aggregate, loss, mask) == 0).all()


def test_permuting_rows_permutes_the_weights(aggregate: Aggregation) -> None:
    loss, mask = case()
    order = torch.tensor([3, 1, 4, 0, 2])
    mixed = loss.detach()[order].requires_grad_()
    torch.testing.assert_close(
        weights(aggregate, mixed, mask[order]), weights(aggregate, loss, mask)[order], rtol=0, atol=0
    )


def test_whether_the_cut_into_micro_batches_matters(aggregate: Aggregation, row: Row) -> None:
    loss, mask = case()
    whole = aggregate(loss, mask, DENOMINATORS).item()
    for parts in ([[0, 1], [2, 3, 4]], [[4, 2], [0], [1, 3]], [[i] for i in range(5)]):
        found = sum(aggregate(loss[part], mask[part], DENOMINATORS).item() for part in parts)
        assert math.isclose(found, whole, rel_tol=1e-12) is not row.cut_matters


def test_whether_a_token_of_a_long_completion_counts_the_same(aggregate: Aggregation, row: Row) -> None:
    loss, mask = case()
    found = weights(aggregate, loss, mask)[mask]
    assert bool(torch.allclose(found, found[0].expand_as(found), rtol=1e-13)) is row.equal_tokens


@pytest.mark.parametrize("denominator", sorted(COUNTS))
def test_divides_by_what_it_is_handed_and_by_nothing_else(aggregate: Aggregation, row: Row, denominator: str) -> None:
    loss, mask = case()
    doubled = Denominators(**{**COUNTS, denominator: 2 * COUNTS[denominator]})
    factor = 0.5 if denominator in row.reads else 1.0
    found, before = aggregate(loss, mask, doubled).item(), aggregate(loss, mask, DENOMINATORS).item()
    assert found == pytest.approx(factor * before, rel=1e-14)


def test_float32_is_float64_rounded(aggregate: Aggregation) -> None:
    loss, mask = case()
    found = aggregate(loss.float(), mask, DENOMINATORS).item()
    terms = aggregate(loss.abs(), mask, DENOMINATORS).item()  # weights are positive: Σ |w·l|
    bound = sum_gap(torch.float32, terms, additions=mask.numel() + 3)  # rounded on entry, times the weight, divided
    assert found == pytest.approx(aggregate(loss, mask, DENOMINATORS).item(), rel=0, abs=bound)


def test_pickles_and_says_what_it_is(aggregate: Aggregation) -> None:
    assert pickle.loads(pickle.dumps(aggregate)) is aggregate
    assert aggregate.__doc__
