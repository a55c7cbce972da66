"""recipes/kimi/pipeline*.yaml: their order, and run from end to end with a small model, few rows, few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import run_pipeline
from grpo_lab.recipe.yaml import read_yaml

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "kimi"
SMALL = {
    "n_samples": 4,
    "max_steps": 2,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "steps_per_generation": 1,
    "max_completion_length": 8,
    "max_new_tokens": 8,
    "tries": 1,
    "n": 24,
    "save_steps": 1,
    "max_length": 1024,
    "bf16": False,
    "use_vllm": False,
}
JUDGE = "training.curation_rewards:by_digest"


def cut(written: Any, here: dict[str, Any]) -> Any:
    """A pipeline with the numbers of `SMALL`, a judge for whom a random model is right at times, and what is ``here``
    in the place of what is on the hub. Everything else stays."""
    if isinstance(written, list):
        return [cut(one, here) for one in written]
    if isinstance(written, str):
        return here.get(written, written)
    if not isinstance(written, dict):
        return written
    if written.get("name") == "accuracy":
        return {"name": JUDGE}
    small = {name: SMALL.get(name, value) for name, value in written.items() if name != "vllm_mode"}
    if written.get("name") == "kimi_length":
        small |= {"warmup_steps": 1, "correctness": "by_digest"}
    if "tiny" in written:
        small["tiny"] = {**written["tiny"], "hidden_size": 24}
    if {"stage", "name"} <= written.keys() and written["stage"] not in ("select", "sft", "long2short"):
        small["use_cpu"] = True
    return {name: value if name == "tiny" else cut(value, here) for name, value in small.items()}


@pytest.mark.parametrize("name", ["pipeline", "pipeline_quickstart"])
def test_its_order_is_the_reports(name: str, tmp_path: Path) -> None:
    recipe = pipeline_from({**read_yaml(RECIPES / f"{name}.yaml"), "output_dir": str(tmp_path / "out")})
    reported = ["no_guesses", "sft", "prompts", "rl", "short"]
    assert [one.name for one in recipe.in_order() if one.name in reported] == reported
    stages = {one.name: one for one in recipe.stages}
    assert stages["sft"].inputs["rows"] == "no_guesses.rows"
    assert stages["prompts"].settings["filters"]["band"] == "learnable"
    length = stages["rl"].settings["rewards"][1]
    assert length["name"] == "kimi_length"
    assert length["warmup_steps"] > 0


@pytest.mark.thorough(but="pipeline_quickstart")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline_quickstart", "pipeline"])
def test_it_runs_from_end_to_end(name: str, tiny_folder: Path, tmp_path: Path, grpo_lab_data: Path) -> None:
    """Each stage on what the one before left. The same again changes nothing."""
    problems = (grpo_lab_data / "math" / "math500.jsonl").read_text().splitlines(keepends=True)
    easy = [line for line in problems if json.loads(line)["gold_answer"].isdigit() and len(line) < 900]
    (tmp_path / "train.jsonl").write_text("".join(easy[:24]))
    (tmp_path / "test.jsonl").write_text("".join(easy[24:32]))
    here = {
        "Qwen/Qwen2.5-1.5B": str(tiny_folder),
        "nlile/hendrycks-MATH-benchmark": str(tmp_path / "train.jsonl"),
        "HuggingFaceH4/MATH-500": str(tmp_path / "test.jsonl"),
    }
    written = cut(yaml.safe_load((RECIPES / f"{name}.yaml").read_text()), here)
    recipe = pipeline_from({**written, "output_dir": str(tmp_path / "out")})
    done = run_pipeline(recipe)
    assert list(done) == [one.name for one in recipe.in_order()]
    answers, kept = lines(tmp_path / "out/answers/rows.jsonl"), lines(tmp_path / "out/no_guesses/curated.jsonl")
    assert 0 < len(kept) < len(answers)
    prompts = lines(tmp_path / "out/prompts/curated.jsonl")
    assert prompts
    assert all(0 < row["pass_rate"] < 1 and row["guesses_right"] == 0 for row in prompts)
    assert (tmp_path / "out/short/model.safetensors").is_file()
    models = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.safetensors")}
    assert run_pipeline(recipe) == done
    assert {file: file.stat().st_mtime_ns for file in models} == models


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
