"""Two real processes (accelerate, gloo, CPU) with the same global batch end at the weights of one (issue A, must show 7).

The scripted rollout knows the global row, so the completions of a run are the same however many processes make them. Both
worlds are trained once per module, all runs in one launch. Differences come from the order of float32 sums only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("worker.py")
#: accelerate starts several processes for this type only; with ``MULTI_CPU`` and no mpirun it silently starts one
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
machine_rank: 0
num_processes: {processes}
main_process_port: {port}
use_cpu: true
mixed_precision: "no"
"""
#: 12 rows a step: 3 groups of 4. Two ranks hold 6 rows each, so the second group is split between them.
SPLIT = {1: {"per_device_train_batch_size": 4}, 2: {"per_device_train_batch_size": 2}}
#: 16 rows a step: 4 groups, two on each of two ranks.
WHOLE = {1: {"per_device_train_batch_size": 8}, 2: {"per_device_train_batch_size": 4}}


@dataclass(frozen=True)
class Pair:
    """One training, in two worlds."""

    name: str
    sizes: dict[int, dict[str, int]]
    args: dict[str, Any]
    group_reward: bool = False


PAIRS = [
    Pair("grpo-exact", SPLIT, {"objective": "grpo"}),
    Pair("grpo-off", SPLIT, {"objective": "grpo", "update": "off"}),
    Pair("dr_grpo-exact", SPLIT, {"objective": "dr_grpo"}),
    Pair("dr_grpo-off", SPLIT, {"objective": "dr_grpo", "update": "off"}),
    Pair("dr_grpo-whole-groups", WHOLE, {"objective": "dr_grpo", "gradient_accumulation_steps": 2}),
    Pair("dapo-twice-beta", SPLIT, {"objective": "dapo", "beta": 0.04, "num_iterations": 2}),
    Pair("small-bins", SPLIT, {"objective": "dr_grpo", "update": {"max_tokens": 40}}),
    Pair("trl-settings", SPLIT, {"loss_type": "grpo"}),
    Pair("group-reward", SPLIT, {"objective": "dr_grpo"}, group_reward=True),
]


@dataclass
class World:
    folder: Path

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / f"{name}.pt", weights_only=True)
        return loaded

    def report(self, name: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return read


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(processes: int, model: Path, out: Path) -> World:
    runs = [
        {"name": pair.name, "args": {**pair.args, **pair.sizes[processes]}, "group_reward": pair.group_reward}
        for pair in PAIRS
    ]
    out.mkdir()
    (out / "spec.json").write_text(json.dumps({"model": str(model), "out": str(out), "runs": runs}))
    (out / "accelerate.yaml").write_text(CONFIG.format(processes=processes, port=free_port()))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(out / "accelerate.yaml")]
    finished = subprocess.run(
        [*command, str(WORKER), str(out / "spec.json")],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return World(out)


@pytest.fixture(scope="module")
def worlds(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    root = tmp_path_factory.mktemp("worlds")
    return {processes: launch(processes, tiny_folder, root / str(processes)) for processes in (1, 2)}


pytestmark = pytest.mark.slow


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    gap = sum((ours[name].double() - value.double()).square().sum().item() for name, value in theirs.items())
    size = sum(value.double().square().sum().item() for value in theirs.values())
    return float((gap / size) ** 0.5)


def steps(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in report["history"] if "loss" in row]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_same_weights_after_four_steps(pair: Pair, worlds: dict[int, World], tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    one, two = worlds[1].report(pair.name), worlds[2].report(pair.name)
    assert (one["world"], two["world"]) == (1, 2)
    assert len(steps(one)) == len(steps(two)) == 4
    found, expected = worlds[2].weights(pair.name), worlds[1].weights(pair.name)
    difference = relative_difference(found, expected)
    start = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).state_dict()
    moved = relative_difference(expected, start)
    print(f"{pair.name}: weights differ by {difference:.1e} relative, training moved them by {moved:.1e}")
    assert moved > 3e-4, "hardly trained: nothing was compared"
    assert difference <= 1e-6


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_same_loss_rewards_and_metrics(pair: Pair, worlds: dict[int, World]) -> None:
    """Means are (sum, count) pairs over ranks, so one process and two log the same numbers."""
    exact = pair.args.get("update") != "off" and "objective" in pair.args
    for one, two in zip(steps(worlds[1].report(pair.name)), steps(worlds[2].report(pair.name)), strict=True):
        of_generation = ("reward", "reward_std", "groups/dead_share", "completions/mean_length")
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)
        assert [name in two for name in of_generation] == [name in one for name in of_generation]
        for name in (name for name in of_generation if name in one):  # a reused batch logs none of them
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), name
        if "objective" in pair.args:  # TRL's own definition averages micro-batch means, and those differ
            assert two["entropy"] == pytest.approx(one["entropy"], rel=1e-5)
        if exact:
            assert two["update/live_share"] == pytest.approx(one["update/live_share"], rel=1e-6)


def test_advantages_are_of_whole_groups(worlds: dict[int, World]) -> None:
    """The middle group lies on both ranks; its advantages are those of one process."""
    one, two = worlds[1].report("grpo-exact"), worlds[2].report("grpo-exact")
    assert len(one["advantages"]) == 12
    assert two["advantages"] == pytest.approx(one["advantages"], rel=1e-6)


def test_group_rewards_see_whole_groups_and_agree_on_every_rank(worlds: dict[int, World]) -> None:
    (alone,) = worlds[1].report("group-reward")["group_rewards"]
    first, second = worlds[2].report("group-reward")["group_rewards"]
    assert first == second == alone
    assert all(sorted(group) == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0]) for group in alone)


def test_rows_move_between_ranks_only_when_the_update_is_exact(worlds: dict[int, World]) -> None:
    """The exact update computes fewer tokens than stock on the same batch, in the sum over ranks."""
    for row in steps(worlds[2].report("dr_grpo-exact")):
        assert row["update/tokens_computed"] < row["update/tokens_stock"]
    assert all("update/tokens_computed" not in row for row in steps(worlds[2].report("dr_grpo-off")))
