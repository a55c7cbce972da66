"""Resume inside a generation batch of a vision model: pixel values and image counts come back to the bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlavaForConditionalGeneration

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.resume.generation_buffer import rows_file
from parity.harness import weight_difference
from parity.stock_like import Case, metric_differences, run
from parity.tiny_vlm import with_images


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"beta": 0.1}])
def test_images_of_an_open_batch(models: dict[str, Path], tmp_path: Path, more: dict[str, Any]) -> None:
    """transformers saves LLaVA under other names than ``Trainer`` looks for: it loads none of the weights, and
    warns."""
    saving = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "num_iterations": 2,
        **more,
    }
    whole = run(LabTrainer, LabConfig, Case("whole", saving, with_images, model="llava"), models, tmp_path)
    assert (tmp_path / "checkpoint-1" / rows_file(0)).is_file()
    assert any("pixel_values" in rows for rows in whole.trainer._buffered_inputs)

    resumed = functools.partial(with_images, resume="checkpoint-1")
    again = run(LabTrainer, LabConfig, Case("again", saving, resumed, model="llava"), models, tmp_path)
    assert again.losses == whole.losses
    assert metric_differences(again, whole, ("train_loss",)) == []
    assert weight_difference(again, whole) == 0.0

    again.trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    again.trainer._load_best_model()
    best = LlavaForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-1").state_dict()
    assert all(torch.equal(value, best[name]) for name, value in again.trainer.model.state_dict().items())
    (tmp_path / "checkpoint-1" / "model.safetensors").write_bytes(
        safetensors.torch.save({"x": torch.ones(2)}, {"format": "pt"})
    )
    with pytest.raises(ValueError, match=r"lacks 70 of 70 tensors of the model \(lm_head\.weight"):
        again.trainer._load_best_model()
