"""Kimi's optimizer reset on two ranks, replicated (DDP) and sharded (FSDP2): empty after each iteration on every rank,
and the weights of one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distributed.launch import run_worker
from distributed.optimizer_reset_worker import Entries, settings
from grpo_lab import KimiTrainer
from grpo_lab.rewards import KimiLengthReward
from parity.harness import ONE_ROW_IN_A_HUNDRED, adamw_bound, mixed_reward, movement_difference, train

pytestmark = pytest.mark.slow


@pytest.mark.thorough(but="fsdp2")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_empty_after_each_iteration_on_both_ranks(sharding: str, tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("optimizer_reset_worker", sharding, 2, tiny_folder, tmp_path)
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
    alike = replace(one, weights={name: one.weights[name] for name in found})
    bound = adamw_bound(alike)  # AdamW divides rounding by rounding where a gradient is nearly 0
    assert bound < ONE_ROW_IN_A_HUNDRED
    assert movement_difference(replace(one, weights=found), alike) <= bound
