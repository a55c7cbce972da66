"""FSDP2 with really sharded parameters (2 CPU ranks, gloo) gives the weights of one process.

accelerate itself wraps the model, as ``recipes/accelerate/fsdp2.yaml`` says (``cpu_fsdp2.py`` explains the one line
that differs from a GPU), so its wrapping, the swap of the optimizer's parameters, gradient sync on the last bin and the
norm of sharded gradients are all in the comparison.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.cases import SHARDED, Case
from distributed.launch import World
from distributed.test_ranks import FEW, first_weights, logged_gaps, relative_difference, rounding
from parity.harness import ONE_ROW_IN_A_HUNDRED

pytestmark = pytest.mark.slow
cases = pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.name)


def test_each_rank_holds_half_of_the_parameters(sharded_world: World) -> None:
    for case in SHARDED:
        report = sharded_world.report(case.name)
        assert (report["kind"], report["fsdp2"], report["world"]) == ("FSDP", True, 2)
        assert report["share_of_parameters"] == pytest.approx(0.5, abs=0.02)


@cases
def test_same_weights_as_one_process(
    case: Case, sharded_world: World, worlds: dict[int, World], tiny_folder: Path
) -> None:
    found, expected = sharded_world.weights(case.name), worlds[1].weights(case.name)
    assert set(found) == set(expected)
    difference = relative_difference(found, expected)
    print(f"{case.name}, fsdp2 on 2 ranks: weights differ by {difference:.1e} relative")
    start = first_weights(tiny_folder)
    bound = rounding(expected, start, case.args.get("max_steps", 4))
    assert difference / relative_difference(start, expected) <= bound < ONE_ROW_IN_A_HUNDRED


@cases
def test_same_losses_and_gradient_norms(case: Case, sharded_world: World, worlds: dict[int, World]) -> None:
    loss, relative = logged_gaps(case)
    for one, sharded in zip(worlds[1].steps(case.name), sharded_world.steps(case.name), strict=True):
        assert sharded["loss"] == pytest.approx(one["loss"], rel=0, abs=loss)
        assert sharded["grad_norm"] == pytest.approx(one["grad_norm"], rel=relative)
        assert ("reward" in sharded) == ("reward" in one)  # a reused batch logs none
        if "reward" in one:
            assert sharded["reward"] == pytest.approx(one["reward"], rel=FEW, abs=FEW)


def test_group_rewards_are_those_of_one_process(sharded_world: World, worlds: dict[int, World]) -> None:
    (alone,) = (rank["tables"] for rank in worlds[1].report("group-split")["ranks"])
    for rank in sharded_world.report("group-split")["ranks"]:
        assert rank["tables"] == alone
