"""What is deleted from a finished folder is noticed wherever that is asked, and made again or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.cli import main
from grpo_lab.pipelines.dry_run import plan_of_training
from grpo_lab.pipelines.long2short import long2short, long2short_recipe_from
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.rounds import run_rounds
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.runner import plan_of_pipeline, run_pipeline
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import recipe_from

pytestmark = pytest.mark.slow

DATA = {"loader": "word_problems", "n": 8, "template": "chat", "largest": 20, "steps": [1, 2]}
HELD_OUT = {"data": {**DATA, "n": 2, "split": "test"}, "max_new_tokens": 4, "batch_size": 2}
LIMITS = {"reward": "training.curation_rewards:by_digest", "n_samples": 4, "max_completion_length": 8, "use_cpu": True}
TRAINING = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, "max_length": 256}
RL = {
    "rewards": [LIMITS["reward"]],
    "data": DATA,
    "evaluation": {**HELD_OUT, "every": 1},
    "max_completion_length": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "save_steps": 1,
    "learning_rate": 1e-2,
    "bf16": False,
    "use_cpu": True,
}


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A finished pipeline with each command that trains."""
    out = tmp_path_factory.mktemp("gone") / "out"
    model = {"path": str(tiny_folder)}
    sampled = {"model": model, "data": DATA, **LIMITS, "training": TRAINING, "evaluation": HELD_OUT}
    stages = [
        {"stage": "rl", "name": "rl", "model": model, **RL},
        {"stage": "rounds", "name": "rounds", "method": "expert_iteration", "rounds": {"count": 2}, **sampled},
        {"stage": "long2short", "name": "short", "method": "shortest_sft", **sampled},
    ]
    recipe = pipeline_from({"output_dir": str(out), "stages": stages})
    run_pipeline(recipe)
    return out, recipe


def alone(made: tuple[Path, Any], tiny_folder: Path) -> Any:
    """The recipe of `rl` for `grpo-lab train`."""
    return recipe_from({"name": "rl", "model": {"path": str(tiny_folder)}, **RL, "output_dir": str(made[0] / "rl")})


def all_agree(out: Path, recipe: Any, stage: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`status`, `report`, `compare` and the dry run."""
    capsys.readouterr()
    assert main(["pipeline", "status", str(out)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(out)]) == 0
    assert said in (out / "report.html").read_text()
    assert main(["compare", str(out), str(out / "rl"), "--output", str(out.parent / "both.html")]) == 0
    assert "to do again" in (out.parent / "both.html").read_text()
    assert stage not in plan_of_pipeline(recipe)["done already"].split(", ")


@pytest.mark.parametrize(
    "file",
    [
        "rl/evaluation/before/outcomes.jsonl",
        "rounds/start/evaluation/outcomes.jsonl",
        "rounds/round-2/model/model.safetensors",
        "short/evaluation/after/summary.json",
    ],
)
def test_a_pipeline_misses_what_its_stages_have_left(
    file: str, made: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = made
    stage, _, place = file.partition("/")
    content = (out / file).read_bytes()
    (out / file).unlink()
    all_agree(out, recipe, stage, f"{stage}: done, to do again: goes on: its {place} is gone", capsys)
    run_pipeline(recipe, only=stage)
    if not file.endswith("summary.json"):  # which has seconds
        assert (out / file).read_bytes() == content
    assert (out / file).is_file()
    assert plan_of_pipeline(recipe)["done already"] == "rl, rounds, short"
    assert not [*out.glob("*.before-*")]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "evaluation/before/outcomes.jsonl"])
def test_train_alone_makes_it_again(
    name: str, made: tuple[Path, Any], tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "finished: nothing to do"."""
    folder = made[0] / "rl"
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    assert name in plan_of_training(alone(made, tiny_folder))["to make again"]
    assert main(["report", str(folder)]) == 0
    assert f"{name} is gone" in (folder / "report.html").read_text()
    train(alone(made, tiny_folder))
    assert (folder / name).read_bytes() == content
    assert "nothing to do" not in capsys.readouterr().out
    assert "to make again" not in plan_of_training(alone(made, tiny_folder))
    train(alone(made, tiny_folder))
    assert "nothing to do" in capsys.readouterr().out


def test_the_other_commands_make_their_weights_again(made: tuple[Path, Any]) -> None:
    out, recipe = made
    for stage in ("rounds", "short"):
        weights = (out / stage / "model.safetensors").read_bytes()
        entry = next(one for one in recipe.stages if one.name == stage)
        (out / stage / "model.safetensors").unlink()
        read, do = {"rounds": (rounds_recipe_from, run_rounds), "short": (long2short_recipe_from, long2short)}[stage]
        do(read({"name": stage, **entry.settings, "output_dir": str(out / stage)}))
        assert (out / stage / "model.safetensors").read_bytes() == weights


def test_what_cannot_be_made_again_is_refused(made: tuple[Path, Any], tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rl"
    shutil.copytree(made[0] / "rl", folder)
    here = recipe_from({"name": "rl", "model": {"path": str(tiny_folder)}, **RL, "output_dir": str(folder)})
    shutil.rmtree(folder / "evaluation" / "step_1")
    for ask in (train, plan_of_training):
        with pytest.raises(ValueError, match=r"evaluation/step_1/\S+ is gone from the finished run .* put a copy back"):
            ask(here)
    shutil.copytree(made[0] / "rl" / "evaluation" / "step_1", folder / "evaluation" / "step_1")
    (folder / "model.safetensors").unlink()
    for place in folder.glob("checkpoint-*"):
        shutil.rmtree(place)
    for ask in (train, plan_of_training):
        with pytest.raises(ValueError, match=r"model.safetensors is gone .* no whole checkpoint is left"):
            ask(here)
