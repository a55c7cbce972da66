"""PPO with a critic on one process: a float64 oracle, what is saved, what is refused, and who must not see the critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import ppo_oracle
from grpo_lab import LabConfig, PPOTrainer
from parity.harness import LENGTHS, Run, arguments, assert_same_movement, train
from ppo_oracle import Interleaved
from tolerance import loss_gap, metric_gap


def run(folder: Path, out: Path, critic: Path, **changes: Any) -> tuple[Run, Interleaved]:
    eos = AutoTokenizer.from_pretrained(folder).eos_token_id
    rollout = Interleaved(range(20, 90), LENGTHS, end_id=eos, truncated_share=0.3)
    args = LabConfig(**{**arguments(out, max_steps=4), **ppo_oracle.settings(critic), **changes})
    return train(PPOTrainer, args, folder, rollout=rollout, reward=ppo_oracle.scripted_reward), rollout


@pytest.mark.parametrize("kind", ppo_oracle.KINDS)
@pytest.mark.parametrize("update", ["exact", "off"])
def test_weights_and_losses_are_a_float64_oracles(kind: str, update: str, tiny_folder: Path, tmp_path: Path) -> None:
    critic = ppo_oracle.critic_folder(tmp_path / "critic", kind)
    ours, rollout = run(tiny_folder, tmp_path / "out", critic, update=update)
    eos = ours.trainer.processing_class.eos_token_id
    oracle = ppo_oracle.replayed(tiny_folder, critic, kind, eos, rollout.batches, 4)
    assert set(oracle.state()) == set(ours.weights)
    first = ppo_oracle.Oracle(tiny_folder, critic, kind, eos).state()
    start = {name: value.float() for name, value in first.items()}
    expected = Run([], [], oracle.state(), start, [{"step": 4}], None)
    assert_same_movement(Run([], [], ours.weights, start, [], None), expected)
    moved = {name: value for name, value in expected.weights.items() if "critic" in name}
    assert_same_movement(Run([], [], ours.weights, start, [], None), Run([], [], moved, start, [{"step": 4}], None))
    steps = [row for row in ours.history if "value/loss" in row]
    for row, (policy, value) in zip(steps, oracle.losses, strict=True):
        # means over 12 rows of up to 30 tokens; a whitened advantage is of size 1, a value loss ½(V − R)² of its own
        assert row["value/loss"] == pytest.approx(value, rel=0, abs=metric_gap(torch.float32, 4, 12 * 30, 2 * value))
        bound = loss_gap(torch.float32, 1 + 2 * ppo_oracle.VF * value, 12 * 30, steps=4)
        assert row["loss"] == pytest.approx(policy + ppo_oracle.VF * value, rel=0, abs=bound)
    assert any(row["value/clip_fraction"] > 0 for row in steps)
    assert any(row.get("ppo/kl_reward", 0) < 0 for row in steps)
