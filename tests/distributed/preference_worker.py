"""A preference model that is kept in training, on this world's ranks: whole, and resumed.

    accelerate launch --config_file … tests/distributed/preference_worker.py POLICY PREFERENCE OUT

Leaves ``<name>.json`` (``whole`` and ``resumed``): of each rank its comparisons and a digest of its preference model,
and what was logged.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rewards import PreferenceReward
from grpo_lab.testing import ScriptedRollout
from parity.harness import LENGTHS, arguments, problems

ROWS, STEPS, SAVED = 16, 5, 3


def judge(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 97) for ids in completion_ids]


def build(policy: str, preference: str, out: Path, ranks: int) -> LabTrainer:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    settings = {"per_device_train_batch_size": ROWS // ranks, "gradient_accumulation_steps": 1, "learning_rate": 1e-3}
    settings |= {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
    kept = {"judge": "judge", "every": 2, "steps": 3, "learning_rate": 1e-2, "noise": 0.2, "held_out": 0.3}
    return LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=[PreferenceReward(preference, **kept), judge],
        args=LabConfig(**arguments(out, **settings), objective="dr_grpo"),
        train_dataset=problems(16),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id),
    )


def leave(trainer: LabTrainer, file: Path) -> None:
    weights = torch.cat([one.detach().flatten() for one in trainer.reward_funcs[0].classifier.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    ranks = gather_object([{"pairs": trainer.parts.preference.pairs, "weights": digest}])
    if trainer.accelerator.is_main_process:
        logged = [row for row in trainer.state.log_history if "loss" in row]
        file.write_text(json.dumps({"ranks": ranks, "logged": logged, "tokens": trainer.generated_tokens}))


def main(policy: str, preference: str, out: str) -> None:
    ranks, folder = int(os.environ.get("WORLD_SIZE", "1")), Path(out)
    whole = build(policy, preference, folder / "whole", ranks)
    whole.train()
    leave(whole, folder / "whole.json")
    again = build(policy, preference, folder / "again", ranks)
    again.rollout_func.calls = SAVED
    again.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{SAVED}"))
    leave(again, folder / "resumed.json")
    whole.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
