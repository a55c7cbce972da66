"""Advantage rules of the levels ``table`` and ``token`` with two updates a generation, on this world's ranks.

    accelerate launch --config_file … tests/distributed/rules_worker.py MODEL OUT

Leaves ``<run>.pt`` (final weights) and ``<run>.json`` (prompts and completions of all ranks, a list a generation).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed.process_worker import ROWS, Kept, weights
from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from parity.harness import LENGTHS, arguments, problems
from process_oracle import GROUP, LR
from reference import oracle


def earned(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 5 / 4 for ids in completion_ids]


def in_steps(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) % 3 / 2 for ids in completion_ids]


#: run → (rule, rewards, update)
RUNS: dict[str, tuple[str, list[Any], str]] = {
    "token": ("optimal_token_baseline", [earned], "exact"),
    "token-off": ("optimal_token_baseline", [earned], "off"),
    "tokens-of-the-batch": ("reinforce_pp_baseline", [earned], "exact"),
    "two-rewards": ("gdpo", [earned, in_steps], "exact"),
    "lengths": ("opo", [earned], "exact"),
}


def literal(rule: str, completions: list[list[int]], of_all: list[torch.Tensor]) -> list[list[float]]:
    """The advantage of each token, in loops."""
    rewards: list[float | None] = [*earned(completions)]
    lengths = [len(ids) for ids in completions]
    if rule == "optimal_token_baseline":
        energies = [
            [
                math.fsum((math.exp(logp) - (v == chosen)) ** 2 for v, logp in enumerate(there))  # ‖onehot − π‖²
                for chosen, there in zip(ids, table.tolist(), strict=True)
            ]
            for ids, table in zip(completions, of_all, strict=True)
        ]
        return oracle.token_baseline(rewards, energies, GROUP)
    if rule == "gdpo":
        both: list[list[float | None]] = [list(row) for row in zip(rewards, in_steps(completions), strict=True)]
        found = oracle.gdpo(both, [1.0, 1.0], GROUP, 1e-4)
    else:
        found = oracle.advantages(rule, rewards, GROUP, lengths=lengths)
    return [[advantage] * n for advantage, n in zip(found, lengths, strict=True)]


def main(model: str, out: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name, (rule, rewards, update) in RUNS.items():
        settings = {
            "per_device_train_batch_size": ROWS // 3 // ranks, "gradient_accumulation_steps": 3, "num_iterations": 2,
            "max_steps": 4, "learning_rate": LR,
        }  # fmt: skip
        trainer = LabTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=rewards,
            args=LabConfig(
                **arguments(Path(out) / name, **settings), objective={"name": "grpo", "advantage": rule}, update=update
            ),
            train_dataset=problems(),
            processing_class=tokenizer,
            rollout_func=Kept(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2),
        )
        trainer.train()
        made = gather_object([trainer.rollout_func.batches])
        batches = [
            [[ids for rank in made for ids in rank[call][part]] for part in (0, 1)] for call in range(len(made[0]))
        ]
        if trainer.accelerator.is_main_process:
            torch.save(weights(trainer), Path(out) / f"{name}.pt")
            (Path(out) / f"{name}.json").write_text(json.dumps({"world": ranks, "batches": batches}))
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
