"""The objective puts ratio, surrogate, sampler weight, KL and aggregation together in the right order."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.batch import RewardTable, TokenBatch, earlier_name
from grpo_lab.objectives import KLTerm, LiteralRow, Objective, Reinforce, Unclipped, fixed_budget, preset, token_mean
from grpo_lab.trainer.exactness.loss_proof import prove_loss
from reference.cases import DENOMINATORS, random_batch


def two_tokens(advantage: float = 2.0, weight: float | None = None) -> TokenBatch:
    """log π = −1, −3; log π_ref = −1 + log 2, −3; on-policy."""
    logps = torch.tensor([[-1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    return TokenBatch(
        logps=logps,
        proximal_logps=logps.detach(),
        log_ratio=logps - logps.detach(),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        mask=torch.ones(1, 2, dtype=torch.bool),
        ref_logps=torch.tensor([[-1.0 + math.log(2), -3.0]], dtype=torch.float64),
        sampler_weights=None if weight is None else torch.tensor([[weight]], dtype=torch.float64),
    )


def test_the_sampler_weight_multiplies_the_surrogate_and_not_the_kl() -> None:
    plain = Objective("x", Reinforce(), token_mean)
    assert plain.token_loss(two_tokens()).tolist() == [[2.0, 6.0]]  # −Â·log π = 2·1 and 2·3
    # w·surrogate + β·k1 = ½·2 + 0.1·(−log 2) and ½·6 + 0
    found = replace(plain, kl=KLTerm(0.1, "k1")).token_loss(two_tokens(weight=0.5))
    assert found.flatten().tolist() == pytest.approx([1 - 0.1 * math.log(2), 3.0], rel=1e-14)


def test_a_completion_that_the_correction_dropped_is_still_pulled_to_the_reference() -> None:
    objective = Objective("x", Unclipped(), token_mean, kl=KLTerm(0.1, "k2"))
    batch = two_tokens(weight=0.0)
    (gradient,) = torch.autograd.grad(objective.token_loss(batch).sum(), batch.logps)
    # β·(−x) = −0.1·log 2; the surrogate's −Â is gone
    assert gradient.flatten().tolist() == pytest.approx([-0.1 * math.log(2), 0.0], abs=1e-15)


def test_a_kl_in_the_reward_or_with_coefficient_zero_adds_nothing_to_the_loss() -> None:
    plain = Objective("x", Reinforce(), token_mean)
    batch = replace(two_tokens(), ref_logps=None)
    for kl in (KLTerm(0.1, "k1", "reward"), KLTerm(0.0, "k3")):
        objective = replace(plain, kl=kl)
        assert objective.kl_in_loss is None
        assert torch.equal(objective.token_loss(batch), plain.token_loss(batch))
    assert replace(plain, kl=KLTerm(0.1, "k1", "reward")).kl_in_reward is not None
    with pytest.raises(ValueError, match="needs reference log-probs"):
        replace(plain, kl=KLTerm(0.1)).token_loss(batch)


def test_a_surrogate_may_give_one_number_a_row() -> None:
    """``[B, 1]`` is spread over the row's tokens: 3 tokens of 5 → 15 over the budget 9 · 6 rows."""
    objective = Objective("x", lambda batch: torch.full_like(batch.advantages, 5.0), fixed_budget)
    batch = random_batch(rows=1, empty_row=False)
    expected = 5.0 * batch.mask.sum().item() / (6 * 9)
    assert objective.loss(batch, DENOMINATORS).item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["advantages", "sampler_weights"])
def test_nan_in_a_masked_advantage_or_weight_stays_there(field: str, bad: float) -> None:
    """A bug found while writing these tests: with a sequence-level ratio the backward's 0 · NaN spread over the row."""
    for ratio in ("token", "sequence"):
        batch = random_batch(ratio=ratio, per_token=True, weights="token")
        batch = replace(batch, **{field: getattr(batch, field).masked_fill(~batch.mask, bad)})
        for push in (Reinforce(), Unclipped()):
            loss = Objective("x", push, token_mean, ratio).loss(batch, DENOMINATORS)
            (gradient,) = torch.autograd.grad(loss, batch.logps, retain_graph=True)
            assert loss.isfinite()
            assert gradient.isfinite().all()
            assert (gradient[~batch.mask] == 0).all()


def test_diagnostics_are_the_surrogates_and_carry_no_gradient() -> None:
    class Mine:
        def __call__(self, batch: TokenBatch) -> Tensor:
            return batch.logps

        def diagnostics(self, batch: TokenBatch) -> dict[str, Tensor]:
            return {"mine": batch.logps * 2}

    assert not Objective("x", Mine(), token_mean).diagnostics(two_tokens())["mine"].requires_grad
    assert Objective("x", Reinforce(), token_mean).diagnostics(two_tokens()) == {}


def test_preset_by_name() -> None:
    assert (preset("dr_grpo").advantage, preset("dr_grpo").aggregation) == ("group_mean", "fixed_budget")
    with pytest.raises(
        ValueError, match=r"`objective` is 'grop'; it must be one of .*'module:name'.*did you mean 'grpo'"
    ):
        preset("grop")


def test_reward_table_total() -> None:
    # 1·1 + 0.5·2 = 2; a component that could not score is left out: 1·3; no component: unscorable
    values = torch.tensor([[1.0, 2.0], [3.0, math.nan], [math.nan, math.nan], [0.0, 0.0]])
    table = RewardTable(values, ("a", "b"), torch.tensor([1.0, 0.5]), group_size=2)
    assert table.total[:2].tolist() == [2.0, 3.0]
    assert table.total[2].isnan()
    with pytest.raises(ValueError, match=r"4 rows are not whole groups of num_generations=3"):
        RewardTable(values, ("a", "b"), torch.tensor([1.0, 0.5]), group_size=3)
    with pytest.raises(ValueError, match="`reward_funcs` and `reward_weights` must have the same length"):
        RewardTable(values, ("a",), torch.tensor([1.0, 0.5]), group_size=2)


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        (lambda b: b.logps.sum(1), r"a tensor \[1\]"),
        (lambda b: b.logps.sum(), r"a tensor \[\]"),
        (lambda b: b.logps[:, :1].expand(1, 3), r"a tensor \[1, 3\]"),
        (lambda b: None, "a NoneType"),
    ],
)
def test_a_surrogate_of_another_shape_is_named(returned: Any, seen: str) -> None:
    """Some of them broadcast to a wrong loss, others ended in torch's own words."""

    class Team:
        def __call__(self, batch: TokenBatch) -> Any:
            return returned(batch)

    said = (
        rf"surrogate .*test_objective\..*Team returned {seen} for 1 rows of 2 tokens; it must return a tensor "
        r"\[1, 2\].* or \[1, 1\]"
    )
    with pytest.raises(ValueError, match=said):
        Objective("x", Team(), token_mean).token_loss(two_tokens())
    a_row = Objective("x", lambda b: b.logps.sum(1, keepdim=True), token_mean).token_loss(two_tokens())
    assert a_row.tolist() == [[-4.0, -4.0]]  # log π −1 and −3, spread over the row


def test_a_hook_or_an_average_of_another_shape_is_named_before_training() -> None:
    def per_row(loss: Tensor, mask: Tensor, denominators: Any) -> Tensor:
        return loss.sum(1)

    objective = Objective("x", Reinforce(), per_row)
    with pytest.raises(
        ValueError, match=r"aggregation .*per_row returned a tensor \[4\]; it must return a tensor without dimensions"
    ):
        prove_loss(objective.token_loss, objective)

    def token_loss(batch: TokenBatch) -> Tensor:
        return batch.logps.sum(1)

    with pytest.raises(ValueError, match=r"token_loss` returned a tensor \[4\] for 4 rows of 4 tokens"):
        prove_loss(token_loss, replace(objective, aggregate=token_mean), own_hook=True)


def test_a_team_that_still_says_old_logps_reads_the_proximal_ones() -> None:
    batch = two_tokens()
    earlier: Any = batch
    assert earlier.old_logps is batch.proximal_logps
    others = batch.proximal_logps - 0.5
    changed = replace(earlier, old_logps=others)
    assert changed.proximal_logps is others
    assert changed.logps is batch.logps
    construct: Any = LiteralRow
    row = construct(logps=[-1.0], old_logps=[-1.5], log_ratios=[0.5], advantage=1.0)
    assert row.proximal_logps == row.old_logps == [-1.5]


def test_an_earlier_name_warns_once_where_it_is_read() -> None:
    @earlier_name("old", "new")
    @dataclass(frozen=True)
    class Pair:
        new: int

    made: Any = Pair
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert Pair(1).new == 1
        assert not heard
        assert made(old=2).new == 2
        assert made(3).old == 3
    (warning,) = heard
    assert warning.category is DeprecationWarning
    assert str(warning.message) == "`Pair.old` is called `new` now; the old name goes with the next release"
    assert warning.filename == __file__
