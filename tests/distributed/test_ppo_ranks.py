"""PPO on 1 and 2 ranks, and on 2 that each hold half of the policy and of the critic (FSDP2, ZeRO): the float64 loop's
weights, and a resume inside a generation batch to the bit (not under FSDP2, where torch takes back no optimizer without
moments). ZeRO is skipped where DeepSpeed is not installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_oracle
from distributed.launch import run_worker
from distributed.test_zero import ON_CPUS
from grpo_lab.trainer.critic import load_critic
from parity.harness import Run, assert_same_movement

pytestmark = pytest.mark.slow

DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.thorough(but="2-ddp")
@pytest.mark.parametrize(
    ("ranks", "recipe"),
    [
        (1, "single"), (2, "ddp"), (2, "fsdp2"), pytest.param(2, "zero2", marks=DEEPSPEED),
        pytest.param(2, "zero3", marks=DEEPSPEED)
    ],
)  # fmt: skip
def test_final_weights_and_a_resume(ranks: int, recipe: str, tiny_folder: Path, tmp_path: Path) -> None:
    for kind in ppo_oracle.KINDS:
        ppo_oracle.critic_folder(tmp_path / f"critic-{kind}", kind)
    zero = recipe.startswith("zero")
    run_worker("ppo_worker", recipe, ranks, tiny_folder, tmp_path, cold=zero, **(ON_CPUS if zero else {}))
    eos = AutoTokenizer.from_pretrained(tiny_folder).eos_token_id
    for kind in ppo_oracle.KINDS:
        report = json.loads((tmp_path / f"{kind}.json").read_text())
        assert report["world"] == ranks
        assert report["share"] == pytest.approx(0.5 if recipe in ("fsdp2", "zero3") else 1.0, abs=0.02)
        assert report["resumed"] == []
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
