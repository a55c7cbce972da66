"""What every surrogate must do, at every ratio level and with every aggregation. A new one costs one row in
``ROWS``."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.batch import Denominators, TokenBatch
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
    MirrorDescent,
    Objective,
    PrimeRL,
    Reinforce,
    SoftGate,
    TotalVariationRegion,
    Unclipped,
    log_ratio,
)
from reference.cases import DENOMINATORS, changed, padded, poisoned, random_batch, rebuilt, rows_of, unchosen
from tolerance import two_walks

HOSTILE = [math.nan, math.inf, -math.inf]


@dataclass(frozen=True)
class Row:
    """What is true of one surrogate.

    Args:
        make: builds it; called with no arguments.
        reads_ratio: the importance ratio matters.
        detached: has a stop-gradient, so numerical differentiation of its value is not its gradient.
        pulls: acts where the advantage is 0, too, so no row may be left out.
        rounding: what a function of torch's gives otherwise at another place of a tensor, relative (``sigmoid``).
    """

    make: Callable[[], Any]
    reads_ratio: bool = True
    detached: bool = False
    pulls: bool = False
    rounding: float = 0.0


ROWS: dict[str, Row] = {
    "reinforce": Row(Reinforce, reads_ratio=False),
    "unclipped": Row(Unclipped),
    "clipped": Row(Clipped),
    "clipped (higher)": Row(lambda: Clipped(0.2, 0.28)),
    "clipped (two-sided)": Row(lambda: Clipped(0.1, 0.3, 1.5)),
    "cispo": Row(DetachedWeight, detached=True),
    "mirror_descent": Row(MirrorDescent, pulls=True),
    "mirror_descent (tau 0)": Row(lambda: MirrorDescent(0.0), reads_ratio=False),
    "cispo (tight)": Row(lambda: DetachedWeight(0.9), detached=True),
    "gmpo": Row(GeometricMean),
    "dppo_tv": Row(TotalVariationRegion, reads_ratio=False),
    "dppo_tv (asymmetric, truncated)": Row(lambda: TotalVariationRegion(0.1, 0.3, 20.0), reads_ratio=False),
    "dppo_kl": Row(KLRegion, reads_ratio=False),
    "prime_rl": Row(PrimeRL, reads_ratio=False, pulls=True),
    "clip_cov": Row(ClipCov),
    "kl_cov": Row(KLCov, pulls=True),
    "sapo": Row(SoftGate, rounding=1e-14),
    "sapo (steep)": Row(lambda: SoftGate(6.0, 3.0), rounding=1e-14),
    "vespo": Row(GammaWeight, detached=True),
    "vespo (flat)": Row(lambda: GammaWeight(0.5, 1.0, 0.5, 1.0), detached=True),
}


def test_every_surrogate_has_a_row() -> None:
    assert {name.split(" (")[0] for name in ROWS} == SURROGATES.keys()


@pytest.fixture(params=list(ROWS))
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


@pytest.fixture(params=RATIO_LEVELS)
def ratio(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def loss_and_gradient(
    row: Row, ratio: str, batch: TokenBatch, aggregation: str = "fixed_budget"
) -> tuple[float, Tensor]:
    loss = Objective("row", row.make(), AGGREGATIONS[aggregation], ratio).loss(batch, DENOMINATORS)
    (gradient,) = torch.autograd.grad(loss, batch.logps)
    return loss.item(), gradient


def batches(ratio: str, **changes: Any) -> list[TokenBatch]:
    """Advantages per row and per token; without and with a sampler weight."""
    return [
        random_batch(1, ratio=ratio, **changes),
        random_batch(2, ratio=ratio, per_token=True, weights="token", **changes),
        random_batch(3, ratio=ratio, weights="sequence", **changes),
    ]


def test_shape(row: Row, ratio: str) -> None:
    batch = random_batch(ratio=ratio)
    assert row.make()(batch).shape in (batch.mask.shape, (batch.mask.size(0), 1))


def test_the_inputs_are_left_alone(row: Row, ratio: str) -> None:
    batch = random_batch(ratio=ratio)
    fields = ("logps", "proximal_logps", "log_ratio", "advantages")
    before = [getattr(batch, name).detach().clone() for name in fields]
    row.make()(batch)
    for name, value in zip(fields, before):
        assert torch.equal(getattr(batch, name), value)


def test_gradcheck(row: Row, ratio: str) -> None:
    if row.detached or ratio == "sequence_token":
        pytest.skip("a stop-gradient: compared with the hand-differentiated oracle in tests/reference")
    for batch in batches(ratio, rows=3, width=4):
        objective = Objective("row", row.make(), AGGREGATIONS["sequence_mean"], ratio)

        def scalar(logps: Tensor, batch: TokenBatch = batch, objective: Objective = objective) -> Tensor:
            again = replace(batch, logps=logps, log_ratio=log_ratio(ratio, logps, batch.proximal_logps, batch.mask))
            return objective.loss(again, DENOMINATORS)

        assert torch.autograd.gradcheck(scalar, batch.logps.detach().clone().requires_grad_())


def test_zero_advantage_gives_exactly_zero_loss_and_gradient(row: Row, ratio: str) -> None:
    """Rows are left out by this (exact update)."""
    if row.pulls:
        pytest.skip("pulls on every row: `vanishes_without_advantage` says so")
    for batch in batches(ratio):
        loss, gradient = loss_and_gradient(row, ratio, replace(batch, advantages=torch.zeros_like(batch.advantages)))
        assert loss == 0.0
        assert (gradient == 0).all()


def test_a_row_of_zero_advantage_gives_the_others_nothing(row: Row, ratio: str) -> None:
    if row.pulls:
        pytest.skip("pulls on every row")
    for batch in batches(ratio):
        advantages = batch.advantages.clone()
        advantages[1] = 0.0
        _, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio, advantages=advantages))
        assert (gradient[1] == 0).all()
        _, without = loss_and_gradient(row, ratio, rows_of(batch, ratio, torch.tensor([0, 2, 3, 4])))
        # A sigmoid's last digit may depend on the place of its element in a vector register.
        torch.testing.assert_close(gradient[[0, 2, 3, 4]], without, rtol=1e-15, atol=0)


def test_appending_padding_changes_nothing(row: Row, ratio: str) -> None:
    for aggregation, fill, batch in itertools.product(sorted(AGGREGATIONS), [0.0, *HOSTILE], batches(ratio)):
        loss, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio), aggregation)
        wide, wide_gradient = loss_and_gradient(row, ratio, padded(batch, ratio, 3, fill), aggregation)
        assert wide == pytest.approx(loss, rel=1e-13), (aggregation, fill)  # a longer sum: maybe in another order
        torch.testing.assert_close(wide_gradient[:, :-3], gradient, rtol=1e-13, atol=1e-15)
        assert (wide_gradient[:, -3:] == 0).all(), (aggregation, fill)


def test_masked_inputs_may_hold_anything(row: Row, ratio: str) -> None:
    for fill, batch in itertools.product(HOSTILE, batches(ratio)):
        loss, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio))
        dirty = poisoned(batch, ratio, fill)
        found, found_gradient = loss_and_gradient(row, ratio, dirty)
        assert found == loss
        assert torch.equal(found_gradient, gradient)
        assert (found_gradient[~dirty.mask] == 0).all()


def test_mask_equals_slice(row: Row, ratio: str) -> None:
    """A completion cut by its mask has the loss of the shorter completion."""
    batch = random_batch(ratio=ratio, empty_row=False)
    cut = torch.zeros_like(batch.mask)
    cut[:, :3] = True
    loss, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio, mask=cut))
    short = changed(rebuilt(batch, ratio, mask=cut), ratio, lambda values: values[:, :3])
    sliced, sliced_gradient = loss_and_gradient(row, ratio, short)
    assert loss == pytest.approx(sliced, rel=1e-13)
    torch.testing.assert_close(gradient[:, :3], sliced_gradient, rtol=1e-13, atol=1e-15)


def test_all_masked_is_a_differentiable_zero(row: Row, ratio: str) -> None:
    for aggregation in AGGREGATIONS:
        batch = random_batch(ratio=ratio)
        loss, gradient = loss_and_gradient(
            row, ratio, rebuilt(batch, ratio, mask=torch.zeros_like(batch.mask)), aggregation
        )
        assert loss == 0.0
        assert (gradient == 0).all()


def test_permuting_rows_permutes_the_gradient(row: Row, ratio: str) -> None:
    order = torch.tensor([3, 1, 4, 0, 2])
    for batch in batches(ratio):
        loss, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio))
        mixed, mixed_gradient = loss_and_gradient(row, ratio, rows_of(batch, ratio, order))
        assert mixed == pytest.approx(loss, rel=1e-13)
        torch.testing.assert_close(mixed_gradient, gradient[order], rtol=row.rounding, atol=0)


def test_splitting_into_micro_batches_changes_nothing(row: Row, ratio: str) -> None:
    for aggregation, batch in itertools.product(sorted({*AGGREGATIONS} - {"local_token_mean"}), batches(ratio)):
        loss, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio), aggregation)
        parts = [torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([2, 4])]
        found = [loss_and_gradient(row, ratio, rows_of(batch, ratio, part), aggregation) for part in parts]
        assert sum(value for value, _ in found) == pytest.approx(loss, rel=1e-13), aggregation
        torch.testing.assert_close(
            torch.cat([g for _, g in found]), gradient[torch.cat(parts)], rtol=row.rounding, atol=0
        )


def test_on_policy_the_push_is_the_score_times_the_advantage(row: Row, ratio: str) -> None:
    """At ρ = 1 the token losses' sum has the gradient −Â at every token, whatever the level but the plain product."""
    if getattr(row.make(), "bound", 1) < 1:
        pytest.skip("a bound below 1 damps on-policy tokens")
    batch = unchosen(random_batch(ratio=ratio, spread=0.0))
    objective = Objective("row", row.make(), AGGREGATIONS["fixed_budget"], ratio)
    (gradient,) = torch.autograd.grad(objective.token_loss(batch).sum(), batch.logps)
    # a [B, 1] log-ratio stands in each of the row's |y| tokens, and each token moves it by 1/|y|: −Â again; a product
    # by 1: −|y|·Â
    whole = ratio == "product" and not row.detached and getattr(row.make(), "reads_ratio", True)
    times = batch.mask.sum(1, keepdim=True) if whole else 1
    torch.testing.assert_close(gradient, (-batch.advantages * times * batch.mask), rtol=1e-12, atol=1e-12)


def test_never_pushes_the_wrong_way(row: Row, ratio: str) -> None:
    if row.pulls:
        pytest.skip("pulls back what has moved too far")
    for sign in (1.0, -1.0):
        batch = random_batch(
            5, ratio=ratio, spread=0.1 if ratio == "product" else 1.0
        )  # a product leaves the clip soon
        _, gradient = loss_and_gradient(row, ratio, replace(batch, advantages=sign * batch.advantages.abs()))
        assert (sign * gradient <= 0).all()
        assert (gradient != 0).any()


def test_homogeneous_in_the_advantage(row: Row, ratio: str) -> None:
    """Advantages times 4 (a power of two: exact): the loss times 4."""
    if row.pulls:
        pytest.skip("a pull that the advantage does not scale")
    for batch in batches(ratio):
        loss, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio))
        more, more_gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio, advantages=4 * batch.advantages))
        assert more == 4 * loss
        assert torch.equal(more_gradient, 4 * gradient)


def test_whether_the_ratio_matters(row: Row, ratio: str) -> None:
    batch = random_batch(ratio=ratio, spread=0.05)
    other = rebuilt(batch, ratio, proximal_logps=batch.proximal_logps - 0.1 * torch.arange(5).unsqueeze(1))
    same = torch.equal(loss_and_gradient(row, ratio, rebuilt(batch, ratio))[1], loss_and_gradient(row, ratio, other)[1])
    if row.reads_ratio and not getattr(row.make(), "bound", 1) < 1:
        assert not same
    elif not row.reads_ratio:
        assert same


def test_float32_is_float64_rounded(row: Row, ratio: str) -> None:
    """Log-probs rounded on entry, the difference of two, exp, and sums over the tokens."""
    batch = random_batch(7, ratio=ratio, spread=0.1)
    single = rebuilt(
        batch,
        ratio,
        **{name: getattr(batch, name).detach().float() for name in ("logps", "proximal_logps", "advantages")},
    )
    loss, gradient = loss_and_gradient(row, ratio, rebuilt(batch, ratio))
    found, found_gradient = loss_and_gradient(row, ratio, single)
    tokens = batch.mask.numel()
    nats = max(batch.logps.abs().max().item(), batch.proximal_logps.abs().max().item(), 1.0)
    push = row.make()(rebuilt(batch, ratio)).detach().abs().expand(batch.mask.shape).masked_fill(~batch.mask, 0.0)
    terms = AGGREGATIONS["fixed_budget"](push, batch.mask, DENOMINATORS).item()
    relative = nats * two_walks(torch.float32, tokens + 8)
    assert found == pytest.approx(loss, rel=0, abs=terms * relative)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=0, atol=gradient.abs().max().item() * relative)


def test_one_token(row: Row, ratio: str) -> None:
    loss, gradient = loss_and_gradient(row, ratio, random_batch(0, 1, 1, ratio, empty_row=False))
    assert math.isfinite(loss)
    assert gradient.isfinite().all()


def test_diagnostics_are_shaped_bounded_and_zero_without_advantage(row: Row, ratio: str) -> None:
    push = row.make()
    if not hasattr(push, "diagnostics"):
        pytest.skip("has none to report")
    batch = random_batch(ratio=ratio)
    shares = {name for name in push.diagnostics(batch) if name not in getattr(push, "of_computed_rows", ())}
    for name, value in push.diagnostics(batch).items():
        assert value.shape in (batch.mask.shape, (batch.mask.size(0), 1))
        assert value.float().min() >= 0
        assert value.float().max() <= (1 if name in shares else 10)
    still = replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert all((push.diagnostics(still)[name] == 0).all() for name in shares)


def test_pickles_compares_and_says_where_it_comes_from(row: Row) -> None:
    push = row.make()
    assert pickle.loads(pickle.dumps(push)) == push
    source = type(push).__doc__ or ""
    assert "loss_t =" in source
    assert "arXiv" in source or "Williams" in source


def test_denominators_divide(row: Row, ratio: str) -> None:
    """Twice the rows of the step: half the loss of these rows."""
    objective = Objective("row", row.make(), AGGREGATIONS["fixed_budget"], ratio)
    batch = random_batch(ratio=ratio)
    twice = Denominators(2 * DENOMINATORS.rows, DENOMINATORS.tokens, DENOMINATORS.budget)
    assert objective.loss(batch, twice).item() == 0.5 * objective.loss(batch, DENOMINATORS).item()
