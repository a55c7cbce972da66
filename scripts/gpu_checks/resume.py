"""Section about resume: three steps and three more from their checkpoint, against six without a stop. The same six
steps are also made twice: where a GPU's kernels do not repeat themselves to the bit, no resume can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset

from gpu_checks.parity import models
from gpu_checks.section import Row, Setting, verdict
from grpo_lab import LabConfig, LabTrainer

STEPS = 6


def section(setting: Setting) -> Iterator[Row]:
    whole = trained(setting, "whole")
    twice = apart(whole, trained(setting, "again"))
    yield verdict("the same six steps twice, largest difference of a weight", twice)
    resumed = apart(whole, trained(setting, "whole", f"{setting.own / 'whole'}/checkpoint-{STEPS // 2}"))
    asked = "three steps and three resumed against six, largest difference of a weight"
    yield verdict(asked, resumed, "0, to the bit", resumed == 0.0 if twice == 0.0 else None)


def trained(setting: Setting, name: str, checkpoint: str | None = None) -> torch.Tensor:
    """Train, from a checkpoint if one is given, and return the final weights in one row. Completions are sampled by the
    model, so that random numbers are part of what is resumed."""
    trainer = LabTrainer(
        model=str(models(setting)),
        reward_funcs=third,
        args=LabConfig(**arguments(setting, name)),
        train_dataset=Dataset.from_dict({"prompt": [f"Tom has {n} apples. How many?" for n in range(64)]}),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return torch.cat([weight.detach().float().cpu().reshape(-1) for weight in trainer.model.parameters()])


def arguments(setting: Setting, name: str) -> dict[str, Any]:
    return {
        "output_dir": str(setting.own / name), "objective": "dr_grpo", "num_generations": 8,
        "per_device_train_batch_size": 16, "max_completion_length": 8 if setting.tiny else 24, "max_steps": STEPS,
        "learning_rate": 1e-3, "save_steps": STEPS // 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
        "bf16": setting.gpu, "use_cpu": not setting.gpu, "seed": 1,
    }  # fmt: skip


def third(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward: the sum of a completion's token ids modulo 3."""
    return [float(sum(ids) % 3) for ids in completion_ids]


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of a weight."""
    return float((one - other).abs().max())
