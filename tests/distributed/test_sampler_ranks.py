"""Prioritised sampling on two real ranks (accelerate, gloo, CPU): one order, one state, the same as one process has.

A step is 12 completions of 3 prompts; on two ranks each holds 6 rows, so the middle group is split between them and its
successes can only be counted after the gather.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.launch import run_worker
from distributed.sampler_worker import RESUME_AT

GROUP = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sampled_worlds(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return {processes: launch(processes, tiny_folder, tmp_path_factory.mktemp("sampler")) for processes in (1, 2)}


def launch(processes: int, model: Path, out: Path) -> dict[str, Any]:
    args = {"per_device_train_batch_size": 4 // processes}
    (out / "spec.json").write_text(json.dumps({"model": str(model), "out": str(out), "args": args}))
    run_worker("sampler_worker", "ddp", processes, out / "spec.json")
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def batches(report: dict[str, Any]) -> list[list[int]]:
    """The global rows of every generation batch: rank after rank."""
    return [[number for rows in of_ranks for number in rows] for of_ranks in zip(*report["ranks"], strict=True)]


def test_ranks_share_one_order_with_whole_groups(sampled_worlds: dict[int, dict[str, Any]]) -> None:
    two = sampled_worlds[2]["whole"]
    assert len(two["ranks"]) == 2
    assert len(set(two["fingerprints"])) == 1
    for batch in batches(two):
        groups = [batch[start : start + GROUP] for start in range(0, len(batch), GROUP)]
        assert all(len(set(group)) == 1 for group in groups)
        assert len({group[0] for group in groups}) == 3


def test_two_ranks_serve_what_one_process_serves(sampled_worlds: dict[int, dict[str, Any]]) -> None:
    assert batches(sampled_worlds[2]["whole"]) == batches(sampled_worlds[1]["whole"])
    assert len(batches(sampled_worlds[1]["whole"])) == 9


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_goes_on_in_the_same_order(sampled_worlds: dict[int, dict[str, Any]], processes: int) -> None:
    report = sampled_worlds[processes]
    assert batches(report["resumed"]) == batches(report["whole"])[RESUME_AT:]
    assert report["resumed"]["fingerprints"] == report["whole"]["fingerprints"]
