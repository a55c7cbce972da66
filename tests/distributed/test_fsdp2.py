"""FSDP2 on CPU ranks (gloo, parameters really sharded) gives the weights of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, train

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "off"])
def test_two_sharded_ranks_equal_one_process(update: str, tiny_folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    worker = [str(TESTS / "distributed" / "fsdp2_worker.py"), str(tiny_folder), str(tmp_path), update]
    done = subprocess.run(
        [*command, *worker], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "result.pt", weights_only=True)
    config = LabConfig(**arguments(tmp_path), objective="dr_grpo", update=None if update == "exact" else update)
    one = train(LabTrainer, config, tiny_folder)
    assert found["share"] < 0.6, "each rank must hold about half of the parameters"
    assert found["losses"] == pytest.approx(one.losses, rel=1e-5, abs=1e-7)
    difference = sum((found["weights"][n].double() - one.weights[n].double()).square().sum() for n in found["weights"])
    size = sum(one.weights[n].double().square().sum() for n in found["weights"])
    assert (difference / size).sqrt() < 1e-6
