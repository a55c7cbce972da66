"""Kimi's optimizer reset on two ranks, replicated (DDP) and sharded (FSDP2): empty after each iteration on every rank, and the
weights of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.optimizer_reset_worker import Entries, settings
from grpo_lab import KimiTrainer
from grpo_lab.rewards import KimiLengthReward
from parity.harness import mixed_reward, train

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_empty_after_each_iteration_on_both_ranks(sharding: str, tiny_folder: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    worker = [str(TESTS / "distributed" / "optimizer_reset_worker.py"), str(tiny_folder), str(tmp_path), sharding]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *worker],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = Entries()
    length = KimiLengthReward(0.5, warmup_steps=2, correctness="parity_reward")
    one = train(
        KimiTrainer, settings(tmp_path, ranks=1), tiny_folder, reward=[mixed_reward(), length], callbacks=[alone]
    )
    full = alone.seen[0][0]
    assert [count for count, _ in alone.seen] == [full, 0, full, 0]
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [count for count, _ in seen] == [full, 0, full, 0]
        assert seen[0][1] is (sharding == "fsdp2")
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    gap = sum((found[name].double() - one.weights[name].double()).square().sum() for name in found)
    size = sum(one.weights[name].double().square().sum() for name in found)
    assert (gap / size).sqrt() < 1e-5  # AdamW divides rounding by rounding where a gradient is nearly 0
