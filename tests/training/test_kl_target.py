"""β steered in a real training: the measured KL stays within ±30% of its target."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from parity.harness import arguments, problems

pytestmark = pytest.mark.slow
TARGET, WARM, STEPS = 0.5, 60, 140


def low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that the policy can learn without end: tokens of the first half of the vocabulary."""
    return [sum(token < 512 for token in ids) / len(ids) for ids in completion_ids]


def steered(folder: Path) -> tuple[list[float], list[float]]:
    """Measured KL and β of every generation batch."""
    torch.manual_seed(0)
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, initializer_range=0.2)
    model.save_pretrained(folder / "start")
    model.config._name_or_path = model.name_or_path = str(folder / "start")  # TRL loads the reference from there
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1,
        "num_generations": 8, "max_completion_length": 6, "learning_rate": 1e-3, "optim": "adamw_torch",
    }  # fmt: skip
    kl = {"estimator": "k1", "placement": "reward", "per": "token", "coefficient": 0.05, "target": TARGET, "rate": 0.2}
    config = LabConfig(**arguments(folder, **settings), objective="dr_grpo", kl=kl)
    trainer = LabTrainer(model, low_tokens, config, problems(32), processing_class=tokenizer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "kl/measured" in row]
    return [row["kl/measured"] for row in rows], [row["kl/beta"] for row in rows]


def holds(seen: list[float]) -> bool:
    """Means of twenty batches (64 completions each), since one batch's KL is an estimate; seen: within ±16%."""
    late = seen[WARM:]
    return all(abs(fmean(late[i : i + 20]) / TARGET - 1) <= 0.3 for i in range(0, len(late) - 19, 20))


@pytest.mark.thorough
def test_the_measured_kl_stays_at_its_target(tmp_path: Path) -> None:
    seen, betas = steered(tmp_path)
    assert holds(seen)
    assert betas[0] == pytest.approx(0.05)
    assert max(betas) > 1.5 * betas[0], "β had nothing to do"
