"""The identity of a model that samples are kept under: everything that shapes its completions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from grpo_lab.recipe.sections import SamplingSettings
from grpo_lab.stages.sample import ModelGenerator


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}Q: {{ m['content'] }}{% endfor %}A:")


def other_tokenizer(folder: Path) -> None:
    written = json.loads((folder / "tokenizer.json").read_text())
    written["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(written))


def other_generation_config(folder: Path) -> None:
    file = folder / "generation_config.json"
    written = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**written, "eos_token_id": [2, 5]}))


def other_context(folder: Path) -> None:
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "rope_theta": 123.0, "rope_parameters": None}))


def other_inner_weight(folder: Path) -> None:
    """Frozen embeddings: both ends of the file stay as they are."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    inner = sorted(name for name in weights if "layers" in name)
    weights[inner[len(inner) // 2]].add_(1.0)
    save_file(weights, file, metadata={"format": "pt"})


CHANGES = [other_template, other_tokenizer, other_generation_config, other_context, other_inner_weight]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_shapes_completions_is_part_of_the_identity(
    tiny_folder: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    settings = SamplingSettings(use_cpu=True)
    before = ModelGenerator(str(model), settings).identity()
    assert ModelGenerator(str(model), settings).identity() == before
    change(model)
    assert ModelGenerator(str(model), settings).identity() != before


def test_what_only_tells_who_saved_it_is_not(tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    before = ModelGenerator(str(model), SamplingSettings(use_cpu=True)).identity()
    written = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**written, "transformers_version": "99"}, indent=7))
    (model / "README.md").write_text("a note")
    assert ModelGenerator(str(model), SamplingSettings(use_cpu=True)).identity() == before
