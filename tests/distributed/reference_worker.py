"""A training whose reference follows the policy and whose β follows the KL, and one resumed from its checkpoint, on
ranks.

    accelerate launch --config_file … tests/distributed/reference_worker.py MODEL OUT

Leaves ``<rank>.json``. Completions are sampled by the model, with each rank's own random numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed.resume_worker import Judge, history
from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, problems


def build(model: str, out: Path, **changes: Any) -> LabTrainer:
    """Two optimizer steps a generation batch; the reference moves after steps 3 and 6."""
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 6,
        "optim": "adamw_torch", "learning_rate": 3e-3, "max_completion_length": 8, "save_strategy": "steps",
        "save_steps": 3, "save_only_model": False, "use_cpu": True, "reference_every": 3,
        "gradient_checkpointing": False,
        "kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.2, "target": 0.5, "rate": 1.0}, **changes,
    }  # fmt: skip
    return LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=Judge(),
        args=LabConfig(**arguments(out, **settings), objective="dr_grpo"),
        train_dataset=problems(16),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def whole(model: Any) -> torch.Tensor:
    """All weights in full; a collective where they are sharded."""
    values = (value.full_tensor() if isinstance(value, DTensor) else value for value in model.parameters())
    return torch.cat([value.detach().flatten() for value in values])


def main(model: str, out: str) -> None:
    folder = Path(out)
    first = build(model, folder / "whole")
    first.train()
    again = build(model, folder / "again")
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    local = [value.to_local() if isinstance(value, DTensor) else value for value in first.ref_model.parameters()]
    report = {
        "fsdp2": first.accelerator.is_fsdp2,
        "share": sum(value.numel() for value in local) / sum(value.numel() for value in start.parameters()),
        "reference is the policy": torch.equal(whole(first.ref_model), whole(first.model)),
        "reference moved": not torch.equal(whole(first.ref_model), whole(start)),
        "weights equal": torch.equal(whole(again.model), whole(first.model)),
        "references equal": torch.equal(whole(again.ref_model), whole(first.ref_model)),
        "betas": [row["kl/beta"] for row in first.state.log_history if "kl/beta" in row],
        "last beta": [first.parts.kl.coefficient, again.parts.kl.coefficient],
        "histories equal": history(first) == history(again),
    }
    (folder / f"{first.accelerator.process_index}.json").write_text(json.dumps(report))
    first.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
