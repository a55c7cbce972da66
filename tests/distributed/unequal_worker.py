"""Two steps of real generation in which rank 0 ends after one token and the others run to the limit: MODEL OUT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed.team_rewards import odd_share
from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, problems


def main(model: str, out: str) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=odd_share,
        args=LabConfig(**arguments(Path(out), max_steps=2, gradient_accumulation_steps=1), objective="dr_grpo"),
        train_dataset=problems(),
        processing_class=tokenizer,
    )
    first = trainer.accelerator.process_index == 0
    trainer.generation_config.eos_token_id = list(range(len(tokenizer))) if first else [len(tokenizer)]
    trainer.train()
    if first:
        lengths = [
            (row["completions/min_length"], row["completions/max_length"]) for row in trainer.state.log_history[:2]
        ]
        print("lengths:", lengths, flush=True)
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the interpreter's teardown ("terminate called without an active exception")
