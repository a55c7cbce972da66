"""A vision model on a data set where some rows have images and others do not: same numbers as stock TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as Pictures
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from parity.harness import assert_same_movement
from parity.stock_like import Case, metric_differences, run
from parity.tiny_vlm import SIDE


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
