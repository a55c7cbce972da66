"""Process supervision with two updates a generation, whole and resumed between them, on this world's ranks.

    accelerate launch --config_file … tests/distributed/process_worker.py MODEL OUT

Leaves ``<update>.pt`` (final weights, ``whole`` and ``resumed``) and ``<update>.json`` (prompts and completions of all
ranks, a list a generation, and how often the resumed run generated).
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
from grpo_lab.testing import ScriptedRollout
from parity.harness import LENGTHS, arguments, problems
from process_oracle import LR, PROCESS, ragged_steps

ROWS, STOP, UPDATES = 12, 3, ("exact", "off")


class Kept(ScriptedRollout):
    """Keeps what it made, a pair (prompts, completions) a generation."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = super().__call__(prompts, trainer)
        self.__dict__.setdefault("batches", []).append([found["prompt_ids"], found["completion_ids"]])
        return found


def build(model: str, out: Path, update: str, ranks: int) -> LabTrainer:
    """Twelve rows a step in three micro-batches, so that on 4 ranks no rank holds a whole group.

    With ``ddp_find_unused_parameters`` DDP leaves its buckets in their first order. Else it sorts them after its first
    step, so that a resumed run's first step adds the gradients of 4 ranks in another order than the whole run's, and
    the last bits differ.
    """
    settings = {
        "per_device_train_batch_size": ROWS // 3 // ranks, "gradient_accumulation_steps": 3, "num_iterations": 2,
        "max_steps": 4, "learning_rate": LR, "save_strategy": "steps", "save_steps": STOP,
        "ddp_find_unused_parameters": True,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    return LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=[ragged_steps],
        args=LabConfig(**arguments(out, **settings), objective=PROCESS, update=update),
        train_dataset=problems(),
        processing_class=tokenizer,
        rollout_func=Kept(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2),
    )


def weights(trainer: LabTrainer) -> dict[str, torch.Tensor]:
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def main(model: str, out: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for update in UPDATES:
        folder = Path(out) / update
        whole = build(model, folder / "whole", update, ranks)
        whole.train()
        again = build(model, folder / "again", update, ranks)
        again.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{STOP}"))
        made = gather_object([whole.rollout_func.batches])
        calls_made = range(len(made[0]))
        batches = [[[ids for rank in made for ids in rank[call][part]] for part in (0, 1)] for call in calls_made]
        calls = gather_object([again.rollout_func.calls])
        if whole.accelerator.is_main_process:
            torch.save({"whole": weights(whole), "resumed": weights(again)}, Path(out) / f"{update}.pt")
            report = {"world": whole.accelerator.num_processes, "batches": batches, "calls after": calls}
            (Path(out) / f"{update}.json").write_text(json.dumps(report))
        whole.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
