"""Every recipe is loaded and dry-run; neighbours differ only where the method does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.data import TEMPLATES
from grpo_lab.pipelines.dry_run import plan_of_training as dry_run
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import plan_of_pipeline
from grpo_lab.recipe.sections import read_recipe, recipe_from
from grpo_lab.recipe.yaml import parse_overrides, read_yaml
from grpo_lab.registry import modules_beside

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OTHER_COMMANDS = (
    *("curate", "long2short", "expert_iteration", "rft", "online_rft", "dpo_rounds", "simpo_rounds", "pipeline", "lab"),
)  # recipes of other commands have tests of their own
RUNS = sorted(
    path
    for path in RECIPES.rglob("*.yaml")
    if path.parent.name != "accelerate" and not path.stem.startswith(OTHER_COMMANDS)
)
PIPELINES = sorted(RECIPES.rglob("pipeline*.yaml"))
LAUNCH = sorted((RECIPES / "accelerate").glob("*.yaml"))
ON_CPU = {"use_cpu": True, "bf16": False}


def test_there_are_recipes() -> None:
    assert {path.stem for path in LAUNCH} >= {"single", "ddp", "fsdp2", "zero2", "zero3"}
    assert {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-math-1.5b"} == {
        path.stem.rsplit("-", 1)[0] for path in RUNS if path.parent.name == "gsm8k" and path.stem != "smoke"
    }


def fewer_rows(written: Any) -> Any:
    """Of problems that are made up: writing ten thousands of them is most of a dry run's time."""
    if isinstance(written, list):
        return [fewer_rows(one) for one in written]
    if not isinstance(written, dict):
        return written
    return {name: min(value, 300) if name == "n" else fewer_rows(value) for name, value in written.items()}


@pytest.mark.not_fast
@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_loads_and_dry_runs(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    changes: dict[str, Any] = {**ON_CPU, "output_dir": str(tmp_path / "out")}
    if path.stem == "smoke":
        changes |= smoke_paths(request.getfixturevalue("grpo_lab_data"))
    modules_beside(path)  # as the command does
    facts = dry_run(recipe_from(fewer_rows(read_yaml(path, changes)), default_name=path.stem))
    assert facts["output folder"] == str(tmp_path / "out")
    assert facts["prompt template"] in TEMPLATES
    assert "surrogate=" in facts["algorithm"] or "TRL's own loss" in facts["algorithm"]
    assert not (tmp_path / "out").exists(), "a dry run must leave nothing behind"


@pytest.mark.not_fast(but="kimi/pipeline")
@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_pipeline_dry_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a team's own general rows lie
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "general.jsonl").write_text('{"prompt": "Say hello.", "completion": "Hello."}\n')
    modules_beside(path)
    written = fewer_rows(read_yaml(path, {"output_dir": str(tmp_path / "out")}))
    plan = plan_of_pipeline(pipeline_from(written, beside=path.parent))
    assert plan["output folder"] == str(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def smoke_paths(data: Path) -> dict[str, Any]:
    return {
        "data.source": str(data / "gsm8k"),
        "evaluation.data.source": str(data / "gsm8k"),
        "model.tokenizer": str(data / "tokenizers" / "qwen3"),
    }


@pytest.mark.parametrize("slug", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-math-1.5b"])
def test_neighbours_differ_only_in_the_method(slug: str) -> None:
    grpo, dr_grpo = (
        yaml.safe_load((RECIPES / "gsm8k" / f"{slug}-{method}.yaml").read_text()) for method in ("grpo", "dr_grpo")
    )
    assert {key for key in grpo if grpo[key] != dr_grpo[key]} == {"name", "objective"}


def test_the_quick_starts_differ_only_in_the_method() -> None:
    dr_grpo, ppo = (
        yaml.safe_load((RECIPES / "quickstart" / f"{name}.yaml").read_text()) for name in ("dr_grpo", "ppo")
    )
    steps = {"per_device_train_batch_size", "steps_per_generation", "max_steps"}  # PPO cuts a batch into four
    differ = {key for key in {*dr_grpo, *ppo} if dr_grpo.get(key) != ppo.get(key)}
    assert differ == {"name", "objective", "value", *steps}
    made = [one["per_device_train_batch_size"] * one["max_steps"] for one in (dr_grpo, ppo)]
    assert made[0] == made[1]
    assert ppo["per_device_train_batch_size"] * ppo["steps_per_generation"] == dr_grpo["per_device_train_batch_size"]


def test_overrides_reach_into_sections() -> None:
    words = "--learning_rate 1e-5 --data.n 7 --rewards.0.mode=lenient --use_cpu --model.tiny.num_layers 1"
    recipe = read_recipe(RECIPES / "quickstart" / "dr_grpo.yaml", parse_overrides(words.split()))
    assert (recipe.arguments["learning_rate"], recipe.arguments["use_cpu"]) == (1e-5, True)
    assert recipe.data.arguments["n"] == 7
    assert recipe.rewards[0].arguments["mode"] == "lenient"
    assert (recipe.model.tiny or {})["num_layers"] == 1


@pytest.mark.slow
def test_smoke_runs_end_to_end_without_a_network(grpo_lab_data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_lab.pipelines.train import train

    changes = {**smoke_paths(grpo_lab_data), "output_dir": str(tmp_path / "smoke")}
    outcome = train(read_recipe(RECIPES / "gsm8k" / "smoke.yaml", changes))
    assert outcome.after is not None
    assert outcome.after.n_problems == 8
    AutoModelForCausalLM.from_pretrained(outcome.folder)
    AutoTokenizer.from_pretrained(outcome.folder)
    lines = (outcome.folder / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in line for line in lines) == 2
    assert outcome.report is not None
    assert "<html" in outcome.report.read_text().lower()
    assert (outcome.folder / "README.md").is_file()
