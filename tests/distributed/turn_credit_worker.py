"""Credit for turns on this world's ranks: scripted trajectories in three environments, one update a generation.

    accelerate launch --config_file … tests/distributed/turn_credit_worker.py MODEL OUT

Leaves ``<rule>-<objective>.pt`` (final weights) and ``.json`` (prompts and completions of all ranks, a list a
generation, and the log) for each rule of ``turn_oracle.RULES`` under GRPO's and Dr.GRPO's denominators.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.rewards import TurnRewards
from parity.harness import LENGTHS, arguments, problems
from turn_oracle import BUDGET, LR, RULES, InTurns, outcome

ROWS, STEPS = 12, 3
CASES = [(rule, objective) for rule in RULES for objective in ("grpo", "dr_grpo")]


def build(model: str, out: Path, rule: str, objective: str, ranks: int, **changes: Any) -> LabTrainer:
    """Twelve rows a step in three micro-batches, so that on 2 ranks a group lies on both."""
    settings = {
        "per_device_train_batch_size": ROWS // 3 // ranks, "gradient_accumulation_steps": 3, "max_steps": STEPS,
        "learning_rate": LR, "max_completion_length": BUDGET, **changes,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    return LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=[TurnRewards(), outcome],
        args=LabConfig(**arguments(out, **settings), objective=objective, advantage=RULES[rule]),
        train_dataset=problems(),
        processing_class=tokenizer,
        rollout_func=InTurns(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2),
    )


def main(model: str, out: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for rule, objective in CASES:
        name = f"{rule}-{objective}"
        trainer = build(model, Path(out) / name, rule, objective, ranks)
        trainer.train()
        made = gather_object([trainer.rollout_func.batches])
        batches = [[[ids for rank in made for ids in rank[call][part]] for part in (0, 1)] for call in range(STEPS)]
        if trainer.accelerator.is_main_process:
            state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
            torch.save({key: value.detach().clone() for key, value in state.items()}, Path(out) / f"{name}.pt")
            report = {"world": ranks, "batches": batches, "history": trainer.state.log_history}
            (Path(out) / f"{name}.json").write_text(json.dumps(report))
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
