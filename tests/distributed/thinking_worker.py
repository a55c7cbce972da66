"""A budgeted training whose ranks differ in how many rows go on: MODEL OUT KIND.

Rank 0 gets a prompt that thinks and one with a closed thinking block, rank 1 only closed ones: rank 0 has rows for both
calls that go on, rank 1 for one of them. Each rank writes ``rank-<r>.pt``: its micro-batches, the gradient of the step
where parameters are whole, the log.
"""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import as_rank
from grpo_lab import LabConfig
from rollouts.server_runs import odd_share
from rollouts.thinking_oracle import CLOSED, Step, Tap, TappedTrainer, run, settings


class Whole(Tap):
    """Nothing of sharded parameters is copied."""

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.steps.append(Step("sequence_mean", None))

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        pass


def main(model: str, out: str, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = settings(Path(out), 8, per_device_train_batch_size=3, num_generations=3, shuffle_dataset=False)
    prompts = [f"Tom has {i} apples.\n{'' if i % 4 == 0 else CLOSED}" for i in range(16)]
    trainer = TappedTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=odd_share,
        args=LabConfig(**args),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    steps = [
        {
            "aggregation": step.aggregation,
            "batches": step.batches,
            "gradient": step.gradient,
            "weights": {} if step.model is None else step.model.state_dict(),
        }
        for step in run(trainer, Whole if kind == "fsdp2" else Tap)
    ]
    rank = trainer.accelerator.process_index
    torch.save({"steps": steps, "history": trainer.state.log_history}, Path(out) / f"rank-{rank}.pt")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
