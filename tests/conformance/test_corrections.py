"""What every correction of the sampler must do. A new one costs one row in ``ROWS``."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.batch import TokenBatch
from grpo_lab.objectives import CORRECTIONS, Clipped, Objective, log_ratio, sampler_log_ratio, sequence_mean
from grpo_lab.objectives.corrections import (
    TIS,
    BatchNormalised,
    GeometricRejection,
    IcePop,
    K3Rejection,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
    kept,
)
from grpo_lab.trainer.exactness.loss_proof import prove_correction, toy_ratios

LOG2 = math.log(2.0)
#: x by hand: ratios 2, ½ | 4, 2 | 1, 1 (three rows of two loss tokens, the third is padding)
HAND = torch.tensor([[LOG2, -LOG2, 9.0], [2 * LOG2, LOG2, math.nan], [0.0, 0.0, -9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False]] * 3)


@dataclass(frozen=True)
class Row:
    """``make`` builds a correction; ``hand`` are its weights of ``HAND``, ``[3][2]`` or ``[3][1]``; ``kept``: shares of
    them within the bounds."""

    make: Callable[[], Any]
    hand: list[list[float]]
    kept: list[list[bool]]


ON, OFF = [True], [False]
ROWS: dict[str, Row] = {
    "token_truncate": Row(TokenTruncate, [[2, 0.5], [3, 2], [1, 1]], [[True, True], [False, True], [True, True]]),
    "token_truncate (both)": Row(
        lambda: TokenTruncate(0.8, 3.0), [[2, 0.8], [3, 2], [1, 1]], [[True, False], [False, True], [True, True]]
    ),
    "token_mask": Row(TokenMask, [[2, 0.5], [0, 2], [1, 1]], [[True, True], [False, True], [True, True]]),
    "token_mask (none)": Row(lambda: TokenMask(None, None), [[2, 0.5], [4, 2], [1, 1]], [[True, True]] * 3),
    "sequence_truncate": Row(SequenceTruncate, [[1], [3], [1]], [ON, OFF, ON]),
    "sequence_mask": Row(SequenceMask, [[1], [0], [1]], [ON, OFF, ON]),
    "sequence_mask (low)": Row(lambda: SequenceMask(1.5, None), [[0], [8], [0]], [OFF, ON, OFF]),
    "tis": Row(TIS, [[2, 0.5], [2, 2], [1, 1]], [[False, True], [False, False], [True, True]]),
    "icepop": Row(IcePop, [[2, 0.5], [4, 2], [1, 1]], [[True, True]] * 3),
    "icepop (tight)": Row(
        lambda: IcePop(0.6, 3.0), [[2, 0], [0, 2], [1, 1]], [[True, False], [False, True], [True, True]]
    ),
    # geometric means 1, √8, 1: tokens offset each other
    "geometric_rejection": Row(GeometricRejection, [[1], [0], [1]], [ON, OFF, ON]),
    "geometric_rejection (wide)": Row(lambda: GeometricRejection(0.1, 3.0), [[1], [1], [1]], [ON, ON, ON]),
    # mean k3: (2 − 1 − log 2 + ½ − 1 + log 2)/2 = 0.25; (4 − 1 − 2 log 2 + 2 − 1 − log 2)/2 = 0.96; 0
    "k3_rejection": Row(K3Rejection, [[0], [0], [1]], [OFF, OFF, ON]),
    "k3_rejection (wide)": Row(lambda: K3Rejection(0.5), [[1], [0], [1]], [ON, OFF, ON]),
    # min(ρ, 2): 2, ½, 2, 2, 1, 1 with mean 17/12; by sequence 1, 2, 1 with mean 4/3
    "batch_normalised": Row(
        BatchNormalised, [[24 / 17, 6 / 17], [24 / 17, 24 / 17], [12 / 17, 12 / 17]], [[True, True]] * 3
    ),
    "batch_normalised (sequence)": Row(lambda: BatchNormalised("sequence"), [[0.75], [1.5], [0.75]], [ON, ON, ON]),
}


@pytest.fixture(params=list(ROWS))
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


def weights_of(correction: Any, x: Tensor, mask: Tensor) -> Tensor:
    if getattr(correction, "whole_batch", False):
        return correction(x, mask, lambda values: values)
    return correction(x, mask)


def random_ratios(spread: float = 0.5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    mask = torch.arange(7) < torch.tensor([7, 1, 4, 6, 3]).unsqueeze(1)
    x = spread * torch.randn(5, 7, generator=draw, dtype=torch.float64)
    x[3] *= 1e-3  # one row that a rejection keeps
    return x.masked_fill(~mask, 0.0), mask


def test_every_correction_has_a_row() -> None:
    assert {name.split(" (")[0] for name in ROWS} == CORRECTIONS.keys()
    assert all(type(row.make()) is CORRECTIONS[name.split(" (")[0]] for name, row in ROWS.items())


def test_weights_by_hand(row: Row) -> None:
    correction = row.make()
    x = sampler_log_ratio(HAND, torch.zeros_like(HAND), MASK)
    weights = weights_of(correction, x, MASK)
    expected = torch.tensor(row.hand, dtype=torch.float64)
    torch.testing.assert_close(weights[:, : expected.size(1)], expected, rtol=1e-15, atol=0)
    assert weights.size(1) in (1, 3)
    assert kept(correction, weights)[:, : expected.size(1)].tolist() == row.kept


def test_the_formula_over_single_floats(row: Row) -> None:
    correction = row.make()
    for x, mask in (random_ratios(), random_ratios(0.02), toy_ratios()):
        weights = weights_of(correction, x, mask).expand(mask.shape)
        rows = [values[: int(of_row.sum())].tolist() for values, of_row in zip(x, mask, strict=True)]
        for at, steps in enumerate(rows):
            for t in range(len(steps)):
                whole = getattr(correction, "whole_batch", False)
                literal = correction.literal(rows, at, t) if whole else correction.literal(steps, t)
                assert weights[at, t].item() == pytest.approx(literal, rel=1e-12)


def test_padding_masked_tokens_and_other_rows_change_nothing(row: Row) -> None:
    correction = row.make()
    x, mask = random_ratios()
    weights = weights_of(correction, x, mask).expand(mask.shape)
    for fill in (math.nan, math.inf, -math.inf):
        dirty = sampler_log_ratio(x.masked_fill(~mask, fill), torch.zeros_like(x), mask)
        assert torch.equal(dirty, x)
    wide = torch.nn.functional.pad(x, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
    torch.testing.assert_close(weights_of(correction, *wide)[:, :1], weights[:, :1], rtol=1e-13, atol=0)
    if not getattr(correction, "whole_batch", False):
        alone = weights_of(correction, x[2:4, :6], mask[2:4, :6]).expand(2, 6)
        torch.testing.assert_close(alone[mask[2:4, :6]], weights[2:4, :6][mask[2:4, :6]], rtol=1e-13, atol=0)


def test_an_unreported_token_has_ratio_one(row: Row) -> None:
    sampler = torch.zeros_like(HAND)
    sampler[1, 0] = math.nan
    x = sampler_log_ratio(HAND.requires_grad_(True), sampler, MASK)
    assert x.tolist() == [[LOG2, -LOG2, 0.0], [0.0, LOG2, 0.0], [0.0, 0.0, 0.0]]
    assert not x.requires_grad
    assert not weights_of(row.make(), x, MASK).requires_grad


def test_no_gradient_and_nothing_without_an_advantage(row: Row) -> None:
    """The loss is w times the uncorrected one, its gradient w times; both are 0 where the advantage is."""
    x, mask = random_ratios()
    logps = (-1.0 + 0 * x).requires_grad_(True)
    advantages = torch.tensor([[1.0], [0.0], [-0.5], [2.0], [0.0]], dtype=torch.float64)
    batch = TokenBatch(logps, logps.detach(), log_ratio("token", logps, logps.detach(), mask), advantages, mask)
    plain = Objective("plain", Clipped(), sequence_mean)
    weights = weights_of(row.make(), x, mask)
    (expected,) = torch.autograd.grad((plain.token_loss(batch) * weights).sum(), logps, retain_graph=True)
    loss = plain.token_loss(TokenBatch(**{**vars(batch), "sampler_weights": weights}))
    (gradient,) = torch.autograd.grad(loss.sum(), logps)
    torch.testing.assert_close(gradient, expected, rtol=1e-15, atol=0)
    silent = (advantages == 0).squeeze(1)
    assert (loss[silent] == 0).all()
    assert (gradient[silent] == 0).all()


def test_float32_is_float64_rounded(row: Row) -> None:
    for x, mask in (random_ratios(), random_ratios(0.02)):
        single = weights_of(row.make(), x.float(), mask)
        torch.testing.assert_close(single.double(), weights_of(row.make(), x, mask), rtol=1e-5, atol=1e-6)


def test_is_proved_pickles_and_says_where_it_comes_from(row: Row) -> None:
    correction = row.make()
    prove_correction(correction)
    assert pickle.loads(pickle.dumps(correction)) == correction
    assert "Source:" in (type(correction).__doc__ or "")
    assert "w" in (type(correction).__doc__ or "").split("=")[0]


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_normalised_over_all_ranks(per: Any) -> None:
    x, mask = random_ratios()
    correction = BatchNormalised(per)
    whole = weights_of(correction, x, mask).expand(mask.shape)
    counts: list[Tensor] = []

    def gather(own: Tensor) -> Tensor:
        counts.append(own)
        return torch.cat(counts)

    correction(x[:2], mask[:2], gather)
    torch.testing.assert_close(correction(x[2:], mask[2:], gather).expand(3, 7), whole[2:], rtol=1e-13, atol=0)
    nothing = weights_of(correction, torch.full((1, 2), -30.0), torch.ones(1, 2, dtype=torch.bool))
    assert (nothing < 1e-8).all()  # a mean of 0 divides nothing


@pytest.mark.parametrize(
    ("correction", "error", "said"),
    [
        (lambda x, mask: x.mean(), ValueError, r"returned a tensor \[\] for 4 rows"),
        (lambda x, mask: 1.0, ValueError, "returned a float"),
        (lambda x, mask: -(x.exp()), ValueError, "finite and at least 0"),
        (lambda x, mask: x.exp() / x.exp().mean(), ValueError, "must say `whole_batch = True`"),
        (lambda x, mask: x.exp() * torch.ones(1, requires_grad=True), ValueError, "with a gradient"),
    ],
)
def test_what_the_proof_finds(correction: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        prove_correction(correction)


def test_a_formula_that_is_another_is_found() -> None:
    @dataclass(frozen=True)
    class Wrong(TokenTruncate):
        def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().__call__(x, mask) * 1.001

    with pytest.raises(RuntimeError, match="and its formula gives"):
        prove_correction(Wrong())


@pytest.mark.parametrize(("kind", "bounds"), [(TokenMask, (2.0, 1.0)), (GeometricRejection, (0.0, 1.0))])
def test_bounds_at_the_door(kind: Any, bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"`correction.low` is"):
        kind(*bounds)
