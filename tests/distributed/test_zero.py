"""DeepSpeed's ZeRO-2 and ZeRO-3 on two CPU ranks (gloo) give the weights of one process; skipped where DeepSpeed is not
installed.

    pip install deepspeed      # compiles a small extension at the first launch: a C++ compiler and some two minutes

The recipes' own files; ``cpu_zero.py`` says which one answer of accelerate differs from a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from distributed.cases import CASES, SPLIT, Case
from distributed.launch import World, train_cases
from distributed.test_ranks import FEW, first_weights, logged_gaps, relative_difference, rounding
from parity.harness import ONE_ROW_IN_A_HUNDRED

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")]
ON_CPUS = {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
STOP = 2
SAVED = {
    "objective": "dapo",
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "save_strategy": "steps",
    "save_steps": STOP,
}
NAMES = ("dr_grpo-sparse", "dapo-twice-beta", "group-split", "clipped-checkpointed", "small-bins", "dr_grpo-off")
ZERO = [*(case for case in CASES if case.name in NAMES), Case("saved", SPLIT, SAVED)]
cases = pytest.mark.parametrize("case", ZERO, ids=lambda case: case.name)


def launched(config: str, processes: int, model: Path, out: Path) -> World:
    """All trainings, and one that goes on from the checkpoint of the last."""
    again = {**replace(ZERO[-1], name="resumed").spec(processes), "from": {"run": "saved", "step": STOP}}
    runs: list[dict[str, Any]] = [*(case.spec(processes) for case in ZERO), again]
    if config == "single":
        return train_cases(processes, model, out, runs, config)
    for run in runs:
        run["args"]["use_cpu"] = False  # accelerate leaves DeepSpeed out of a run that asks for a CPU
    return train_cases(processes, model, out, runs, config, cold=True, **ON_CPUS)


@pytest.fixture(scope="module")
def one(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return launched("single", 1, tiny_folder, tmp_path_factory.mktemp("zero") / "1")


@pytest.fixture(scope="module", params=[2, 3], ids=["ZeRO-2", "ZeRO-3"])
def sharded(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    world = launched(f"zero{request.param}", 2, tiny_folder, tmp_path_factory.mktemp("zero") / "2")
    for case in ZERO:
        report = world.report(case.name)
        assert (report["kind"], report["zero_stage"], report["world"]) == ("DEEPSPEED", request.param, 2)
        assert report["share_of_parameters"] == pytest.approx(0.5 if request.param == 3 else 1, abs=0.02)
    return world


@cases
def test_same_weights_losses_and_gradient_norms(case: Case, sharded: World, one: World, tiny_folder: Path) -> None:
    """Dead micro-batches and steps, a reference model (β > 0, two passes), group rewards over ranks, several bins,
    clipping."""
    found, expected, start = sharded.weights(case.name), one.weights(case.name), first_weights(tiny_folder)
    assert set(found) == set(expected)
    bound = rounding(expected, start, 4)
    apart = relative_difference(found, expected) / relative_difference(start, expected)
    print(f"{case.name}: apart by {apart:.1e} of the movement, bound {bound:.1e}")
    assert apart <= bound < ONE_ROW_IN_A_HUNDRED
    loss, relative = logged_gaps(case)
    for theirs, ours in zip(one.steps(case.name), sharded.steps(case.name), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0, abs=loss)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=relative)
        assert ("reward" in ours) == ("reward" in theirs)  # a reused batch logs none
        if "reward" in theirs:
            assert ours["reward"] == pytest.approx(theirs["reward"], rel=FEW, abs=FEW)


def test_group_rewards_are_those_of_one_process(sharded: World, one: World) -> None:
    (alone,) = (rank["tables"] for rank in one.report("group-split")["ranks"])
    for rank in sharded.report("group-split")["ranks"]:
        assert rank["tables"] == alone


def test_from_a_checkpoint_on(sharded: World, tiny_folder: Path) -> None:
    """AdamW's state, sharded over ranks, comes back: the same steps on the same rows, to the bit on one machine."""
    again, whole = sharded.weights("resumed"), sharded.weights("saved")
    assert all(again[name].equal(value) for name, value in whole.items())
    assert [row["step"] for row in sharded.steps("resumed")] == [1, 2, 3, 4]
