"""A vision model: rows with and without images, same numbers as stock TRL; a resume inside a generation batch, to the
bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as Pictures
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.resume.generation_buffer import rows_file
from parity.harness import assert_same_movement, weight_difference
from parity.stock_like import Case, metric_differences, run
from parity.tiny_vlm import SIDE, with_images


def vision(models: dict[str, Path], with_pictures: bool = True) -> dict[str, Any]:
    """Every other prompt has a picture, in the order of the data set; or none has."""
    noise = np.random.RandomState(0)
    columns: dict[str, Any] = {"prompt": List({"role": Value("string"), "content": Value("string")})}
    if with_pictures:
        columns["images"] = List(Pictures())
    rows: list[dict[str, Any]] = []
    for i in range(8):
        rows.append({"prompt": [{"role": "user", "content": f"What is {i}?"}]})
        if with_pictures:
            picture = Image.fromarray(noise.randint(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))
            rows[-1]["images"] = [picture] if i % 2 else []
    return {
        "model": LlavaForConditionalGeneration.from_pretrained(models["llava"], dtype=torch.float32),
        "processing_class": LlavaProcessor.from_pretrained(models["llava"]),
        "train_dataset": Dataset.from_list(rows, features=Features(columns)),
    }


#: a generation batch is one prompt, and an optimizer step two: one without a picture and one with
ALTERNATING = {"steps_per_generation": 1, "shuffle_dataset": False}


@pytest.mark.slow
def test_text_and_images_in_one_optimizer_step(models: dict[str, Path], tmp_path: Path) -> None:
    case = Case("mixed", ALTERNATING, vision, model="llava")
    stock = run(GRPOTrainer, GRPOConfig, case, models, tmp_path / "stock")
    ours = run(LabTrainer, LabConfig, case, models, tmp_path / "ours")
    assert metric_differences(ours, stock) == []
    assert_same_movement(ours, stock)


@pytest.mark.slow
def test_text_alone_is_still_cut_into_bins(models: dict[str, Path], tmp_path: Path) -> None:
    case = Case("text", {"max_steps": 1}, lambda models: vision(models, with_pictures=False), model="llava")
    assert run(LabTrainer, LabConfig, case, models, tmp_path).trainer.exact_update.verdict.now().stock is None


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
