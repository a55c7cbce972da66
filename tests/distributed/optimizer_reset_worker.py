"""One rank of a Kimi run: accelerate launch … optimizer_reset_worker.py MODEL OUT. Writes what the optimizer held after
each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from forked import as_rank
from grpo_lab import KimiTrainer, LabConfig
from grpo_lab.rewards import KimiLengthReward
from grpo_lab.testing import ScriptedRollout
from parity.harness import LENGTHS, arguments, mixed_reward, problems


class Entries(TrainerCallback):
    """Parameters that have optimizer state, and whether that state is sharded, after every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        state = optimizer.optimizer.state
        self.seen.append((len(state), any(isinstance(s["exp_avg"], DTensor) for s in state.values())))


def settings(out: Path, ranks: int) -> LabConfig:
    sizes = {"per_device_train_batch_size": 12 // ranks, "gradient_accumulation_steps": 1, "num_iterations": 2}
    adam = {"optim": "adamw_torch", "learning_rate": 1e-3}
    return LabConfig(**arguments(out, **sizes, **adam))


def main(model_folder: str, out: str) -> None:
    config = settings(Path(out), ranks=2)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    entries = Entries()
    trainer = KimiTrainer(
        model=model,
        reward_funcs=[mixed_reward(), KimiLengthReward(0.5, warmup_steps=2, correctness="parity_reward")],
        args=config,
        train_dataset=problems(),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2),
        callbacks=[entries],
    )
    trainer.train()
    bare = trainer.accelerator.unwrap_model(trainer.model)
    whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in bare.named_parameters()}
    rank = trainer.accelerator.process_index
    (Path(out) / f"{rank}.json").write_text(json.dumps(entries.seen))
    if rank == 0:
        torch.save(whole, Path(out) / "weights.pt")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
