"""Resume inside a generation batch of a vision model: pixel values and image counts come back to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.resume.generation_buffer import rows_file
from parity.harness import weight_difference
from parity.stock_like import Case, metric_differences, run
from parity.tiny_vlm import with_images


@pytest.mark.slow
def test_images_of_an_open_batch(models: dict[str, Path], tmp_path: Path) -> None:
    saving: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "num_iterations": 2,
    }
    whole = run(LabTrainer, LabConfig, Case("whole", saving, with_images, model="llava"), models, tmp_path)
    assert (tmp_path / "checkpoint-1" / rows_file(0)).is_file()
    assert any("pixel_values" in rows for rows in whole.trainer._buffered_inputs)

    def resumed(models: Any) -> Any:
        """transformers 5.17 saves LLaVA under other names than Trainer looks for, so its resume keeps the starting weights."""
        model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-1", dtype=torch.float32)
        return {**with_images(models), "model": model, "resume": "checkpoint-1"}

    again = run(LabTrainer, LabConfig, Case("again", saving, resumed, model="llava"), models, tmp_path)
    assert again.losses == whole.losses
    assert metric_differences(again, whole, ("train_loss",)) == []
    assert weight_difference(again, whole) == 0.0
