"""PPO on 1 and 2 ranks, and on 2 that each hold half of the policy and of the critic: the float64 loop's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_oracle
from distributed.launch import HERE, RECIPES, accelerate_launch
from grpo_lab.trainer.critic.files import load_critic
from parity.harness import Run, assert_same_movement

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, False), (2, True)], ids=["one", "ddp", "fsdp2"])
def test_final_weights(ranks: int, sharded: bool, tiny_folder: Path, tmp_path: Path) -> None:
    for kind in ppo_oracle.KINDS:
        ppo_oracle.critic_folder(tmp_path / f"critic-{kind}", kind)
    config = RECIPES / ("fsdp2.yaml" if sharded else "ddp.yaml" if ranks > 1 else "single.yaml")
    before = [str(HERE / "cpu_fsdp2.py")] if sharded else []
    accelerate_launch(
        config, ranks, [*before, str(HERE / "ppo_worker.py"), str(tiny_folder), str(tmp_path)], timeout=300
    )
    eos = AutoTokenizer.from_pretrained(tiny_folder).eos_token_id
    for kind in ppo_oracle.KINDS:
        report = json.loads((tmp_path / f"{kind}.json").read_text())
        assert report["world"] == ranks
        assert report["share"] == pytest.approx(0.5 if sharded else 1.0, abs=0.02)
        critic = tmp_path / f"critic-{kind}"
        start = {n: v.float() for n, v in ppo_oracle.Oracle(tiny_folder, critic, kind, eos).state().items()}
        expected = ppo_oracle.replayed(tiny_folder, critic, kind, eos, report["batches"], 4).state()
        found = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        assert set(found) >= {name for name in expected if "critic" in name}
        for part in (expected, {name: value for name, value in expected.items() if "critic" in name}):
            theirs = Run([], [], {n: v for n, v in part.items() if n in found}, start, [{"step": 4}], None)
            assert_same_movement(Run([], [], found, start, [], None), theirs)
        saved = tmp_path / kind / "saved"
        policy = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
        assert not any("critic" in name for name in policy)
        assert all(torch.equal(value, found[name]) for name, value in policy.items() if name in found)
        again = load_critic(saved / "critic").state_dict()
        assert all(torch.equal(value, found[f"{ppo_oracle.CRITIC}.{name}"]) for name, value in again.items())
