"""R1's pipelines: what they say, and the quick start end to end with little of everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.pipelines.kinds import KINDS
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import run_pipeline
from grpo_lab.recipe.yaml import read_yaml

R1 = Path(__file__).resolve().parents[2] / "recipes" / "r1"
FEWER: dict[str, Any] = {"max_steps": 2, "n_samples": 6, "per_device_train_batch_size": 8, "logging_steps": 1}
FEWER |= {"max_completion_length": 12, "not_too_long": 12, "save_strategy": "no"}
JUDGE = "training.curation_rewards:by_digest"  # a random model has right and wrong answers
STRICT = ("one_language", "readable", "not_repeating", "refine")


def stages(written: Any) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in written["stages"]}


def small(entry: dict[str, Any]) -> dict[str, Any]:
    """A stage with little of everything, on a model that can do nothing: the filters that ask for words are let go."""
    found = {name: FEWER.get(name, value) for name, value in entry.items() if name not in STRICT}
    if "data" in found:
        found["data"] = {**found["data"], **({"n": 24} if "n" in found["data"] else {})}
    if "reward" in found:
        found["reward"] = JUDGE
    if "rows" in found:
        found["rows"]["general"].get("data", {})["n"] = 24
    if entry["stage"] == "rl":
        found["save_strategy"] = "no"
        found["rewards"] = [{**one, "steps": 1, "every": 1} if "judge" in one else one for one in entry["rewards"]]
    return found


@pytest.mark.parametrize("name", ["pipeline_quickstart", "pipeline"])
def test_the_second_sft_is_from_the_base_and_every_model_is_scored(name: str) -> None:
    found = stages(read_yaml(R1 / f"{name}.yaml"))
    for sft in ("cold_start", "second_sft"):
        start = found[sft].get("model") or found[sft]["inputs"]["model"]
        assert start == (found["zero"]["model"].get("path") or found["zero"]["inputs"]["model.path"])
    scored = {one.get("inputs", {}).get("model") for one in found.values() if one["stage"] == "evaluate"}
    assert scored >= {
        f"{name}.model" for name in ("zero", "cold_start", "reasoning", "second_sft", "final", "imitation")
    }


def test_both_have_the_same_stages() -> None:
    quick, real = (stages(read_yaml(R1 / f"{name}.yaml")) for name in ("pipeline_quickstart", "pipeline"))
    assert [*quick][2:] == [*real]  # the base is made in the quick start
    for name, entry in real.items():
        assert quick[name]["stage"] == entry["stage"]
        taken = {} if entry["stage"] == "sample" else {"model": "base.model", "model.path": "base.model"}
        missing = quick[name]["inputs"].items() - entry.get("inputs", {}).items()
        assert missing <= taken.items()


def here(entry: Any, places: dict[str, Path]) -> Any:
    """What is on the hub, and the reader's own file, as something here; a GPU's settings without."""
    if isinstance(entry, list):
        return [here(one, places) for one in entry]
    if not isinstance(entry, dict):
        return str(places.get(entry, entry)) if isinstance(entry, str) else entry
    left = {name: here(one, places) for name, one in entry.items() if name not in ("vllm_mode", "engine")}
    left |= {name: False for name in ("bf16", "gradient_checkpointing", "use_vllm") if name in entry}
    if "loader" in entry:
        left["limit"] = 12
    if entry.get("stage") in ("rl", "sample", "sft", "evaluate", "reward_model", "distill"):
        left["use_cpu"] = True
    return left


@pytest.mark.slow
def test_the_real_pipeline_runs_from_end_to_end_with_a_small_model(
    tiny_folder: Path, tmp_path: Path, grpo_lab_data: Path
) -> None:
    """Every stage of the file; the model, the number of rows and steps, and what needs a GPU are others."""
    general = tmp_path / "general.jsonl"
    general.write_text("".join(json.dumps({"prompt": f"Say {i}.", "completion": f"{i}"}) + "\n" for i in range(4)))
    written = read_yaml(R1 / "pipeline.yaml", {"output_dir": str(tmp_path / "out")})
    places: dict[str, Path] = {
        "Qwen/Qwen2.5-1.5B": tiny_folder,
        "Qwen/Qwen2.5-0.5B": tiny_folder,
        "data/general.jsonl": general,
    }
    places["openai/gsm8k"] = grpo_lab_data / "gsm8k"
    real = (here(one, places) for one in written["stages"])
    fewer = {"num_generations": 4, "gradient_accumulation_steps": 2, "problems_per_save": 12, "warmup_steps": 0}
    written["stages"] = [{name: fewer.get(name, value) for name, value in small(one).items()} for one in real]
    for name in ("cold_start", "second_sft", "preference", "imitation"):
        stages(written)[name]["max_steps"] = 2
    stages(written)["distillation"]["per_device_train_batch_size"] = 4  # of 12 rows
    facts = run_pipeline(pipeline_from(written))
    assert {*facts} == {one["name"] for one in written["stages"]}
    assert {name for name, found in facts.items() if found.get("steps") == 2} == {
        *("zero", "reasoning", "final", "cold_start", "second_sft", "preference"),
        *("imitation", "distillation", "own_rl"),
    }
    assert facts["mixed"]["sources"].keys() == {"reasoning", "general"}
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_quick_start_runs_from_end_to_end(tmp_path: Path) -> None:
    written = read_yaml(R1 / "pipeline_quickstart.yaml", {"output_dir": str(tmp_path / "out")})
    written["stages"] = [small(entry) for entry in written["stages"]]
    tiny = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "initializer_range": 0.2}
    stages(written)["base"]["model"] = {"tiny": tiny}
    facts = run_pipeline(pipeline_from(written))
    assert {*facts} == {one["name"] for one in written["stages"]}
    training = ("cold_start", "sft", "rl", "reward_model", "distill")  # of `rl` it was the last step that was logged: 0
    trained = {one["name"] for one in written["stages"] if one["stage"] in training and "max_steps" in one}
    assert {name for name, found in facts.items() if found.get("steps") == 2} == trained
    assert facts["final"]["tokens"] > 0
    assert facts["readable"]["dropped"]["right"] > 0
    assert facts["mixed"]["sources"]["reasoning"] == pytest.approx(3 * facts["mixed"]["sources"]["general"], abs=3)
    assert facts["preference"]["rows"] > 0
    lines = (tmp_path / "out" / "final" / "metrics.jsonl").read_text()
    assert "preference/comparisons" in lines
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()
    left = KINDS["rl"].leaves["preference"]
    assert (tmp_path / "out" / "final" / left / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "zero" / left).exists()
