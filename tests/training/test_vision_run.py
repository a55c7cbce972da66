"""`grpo-lab` with a vision model's folder, on rows of text: dry run, training, evaluation; images are a script's
(tests/parity)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BertConfig

from grpo_lab.cli import main
from grpo_lab.pipelines.dry_run import plan_of_training as dry_run
from grpo_lab.recipe.models import model_class
from grpo_lab.recipe.sections import recipe_from
from parity.tiny_vlm import save_tiny_llava

ROWS = {"loader": "word_problems", "n": 8, "steps": [1, 2], "largest": 20, "template": "chat"}


@pytest.mark.slow
def test_a_vision_model_is_trained_and_measured_on_text(tmp_path: Path) -> None:
    """Before, each ended in transformers' list of 200 kinds of model, or in a traceback."""
    save_tiny_llava(tmp_path / "llava")
    written: dict[str, Any] = {
        "name": "vision", "model": {"path": str(tmp_path / "llava")}, "data": ROWS, "rewards": ["accuracy"],
        "evaluation": {"data": {**ROWS, "split": "test", "n": 4}, "reward": {"name": "accuracy", "mode": "strict"}},
        "objective": "dr_grpo", "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8,
        "max_steps": 1, "use_cpu": True, "bf16": False, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    facts = dry_run(recipe_from(written))
    assert re.search(r"GiB a process: \d+,\d+ parameters", facts["takes"])
    assert "the trainer built around a small stand-in" in facts["checked"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
    assert main(["train", "--config", str(tmp_path / "recipe.yaml")]) == 0
    assert json.loads((tmp_path / "run" / "evaluation" / "after" / "summary.json").read_text())
    assert (tmp_path / "run" / "report.html").is_file()
    words = ["--data", "word_problems", "--n", "4", "--template", "chat", "--max-new-tokens", "8"]
    assert main(["evaluate", str(tmp_path / "run"), *words]) == 0


def test_a_model_that_writes_no_text_is_named(tmp_path: Path) -> None:
    config = {**BertConfig().to_dict(), "model_type": "vit", "architectures": ["ViTModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"holds a 'vit' model \(\['ViTModel'\]\), which writes no text"):
        model_class(str(tmp_path))
