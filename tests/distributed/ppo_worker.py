"""PPO with a head and with a network of its own, on this world's ranks, sharded or not.

    accelerate launch --config_file … [cpu_fsdp2.py | cpu_zero.py] tests/distributed/ppo_worker.py MODEL OUT

Leaves ``<kind>.pt`` (final weights, critic included) and ``<kind>.json`` (prompts and completions of all ranks, a list
a generation, how the model is wrapped, and which weights and numbers of the log are others after a resume inside the
second generation batch), and the folder ``<kind>/saved`` of ``save_model``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_oracle
from distributed.worker import whole_weights
from forked import as_rank
from grpo_lab import LabConfig, PPOTrainer
from parity.harness import LENGTHS, arguments, problems

ROWS = 12
STOP = 3
TIMES = ("step_time", "train_runtime")


def build(model: str, out: Path, kind: str, ranks: int) -> PPOTrainer:
    settings = {
        "per_device_train_batch_size": ROWS // 3 // ranks, "gradient_accumulation_steps": 3, "max_steps": 4,
        "gradient_checkpointing": False, "save_strategy": "steps", "save_steps": STOP,
        # accelerate leaves DeepSpeed out of a run that asks for a CPU
        "use_cpu": os.environ.get("ACCELERATE_USE_CPU") != "false",
        **ppo_oracle.settings(out / f"critic-{kind}"),
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    return PPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=[ppo_oracle.scripted_reward],
        args=LabConfig(**arguments(out / kind, **settings)),
        train_dataset=problems(),
        processing_class=tokenizer,
        rollout_func=ppo_oracle.Interleaved(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.3),
    )


def resumed(trainer: PPOTrainer, model: str, out: Path, kind: str, ranks: int) -> list[str]:
    """What a run that goes on from the checkpoint has otherwise than the whole one."""
    again = build(model, out, kind, ranks)
    again.train(resume_from_checkpoint=str(out / kind / f"checkpoint-{STOP}"))
    whole, theirs = (whole_weights(one.accelerator.unwrap_model(one.model))[0] for one in (trainer, again))
    log, others = ([row for row in one.state.log_history if "loss" in row][STOP] for one in (trainer, again))
    return [name for name in whole if not torch.equal(whole[name], theirs[name])] + [
        name for name in log if name not in TIMES and log[name] != others.get(name)
    ]


def main(model: str, out: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for kind in ppo_oracle.KINDS:
        trainer = build(model, Path(out), kind, ranks)
        trainer.train()
        made = gather_object([trainer.rollout_func.batches])
        batches = [
            [[ids for rank in made for ids in rank[call][part]] for part in (0, 1)] for call in range(len(made[0]))
        ]
        weights, share = whole_weights(trainer.accelerator.unwrap_model(trainer.model))
        trainer.save_model(str(Path(out) / kind / "saved"))
        # FSDP2: torch takes no optimizer state back that lacks moments, and the oracle's SGD has none
        other = [] if trainer.is_fsdp_enabled else resumed(trainer, model, Path(out), kind, ranks)
        if trainer.accelerator.is_main_process:
            torch.save(weights, Path(out) / f"{kind}.pt")
            losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            report = {
                "world": trainer.accelerator.num_processes, "batches": batches, "share": share, "losses": losses,
                "resumed": other
            }  # fmt: skip
            (Path(out) / f"{kind}.json").write_text(json.dumps(report))
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
