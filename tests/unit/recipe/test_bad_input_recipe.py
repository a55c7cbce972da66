"""Mistakes in a recipe or on the command line: one line that names what was seen, what is allowed, the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.cli import main

GOOD: dict[str, Any] = {
    "name": "bad-input",
    "model": {"tiny": {"architecture": "qwen2", "hidden_size": 16, "num_layers": 1}},
    "data": {"loader": "word_problems", "n": 8, "template": "chat"},
    "rewards": [{"name": "accuracy", "mode": "strict"}],
    "use_cpu": True,
    "bf16": False,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 1,
}


def change(path: str, value: Any) -> dict[str, Any]:
    recipe = json.loads(json.dumps(GOOD))
    *steps, last = path.split(".")
    place = recipe
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return recipe


CASES = [
    ("misspelt key", change("learning_rat", 1e-5), ["learning_rat", "did you mean 'learning_rate'"]),
    ("misspelt section key", change("model.tinny", {}), ["tinny", "did you mean 'tiny'"]),
    ("no data", change("data", None), ["the recipe needs `data`"]),
    ("unknown loader", change("data.loader", "gsm9k"), ["data.loader", "gsm9k", "gsm8k"]),
    ("unknown template", change("data.template", "r2"), ["r2", "r1", "template"]),
    ("argument of no loader", change("data.colour", "red"), ["`data`", "colour"]),
    ("unknown reward", change("rewards.0.name", "acuracy"), ["acuracy", "accuracy"]),
    ("reward argument", change("rewards.0.mode", "fuzzy"), ["fuzzy", "strict"]),
    ("unknown preset", change("objective", "dr_gpro"), ["dr_gpro", "dr_grpo"]),
    ("contradiction", {**GOOD, "objective": "dr_grpo", "scale_rewards": "group"}, ["scale_rewards", "advantage"]),
    ("unknown trainer", change("trainer", "DrGROPTrainer"), ["trainer", "DrGROPTrainer"]),
    ("two models", change("model.path", "/x"), ["exactly one of `path`", "tiny"]),
    ("no file", {**GOOD, "data": {"loader": "file"}}, ["`data` (loader 'file') needs `source`"]),
    ("no model of a reward", {**GOOD, "rewards": ["token_classification_steps"]}, ["`rewards`", "needs `model`"]),
    ("missing file", {**GOOD, "data": {"loader": "gsm8k", "source": "/no/such/place"}}, ["/no/such/place", "source"]),
    ("batch does not divide", change("num_generations", 3), ["num_generations", "3"]),
]


@pytest.mark.parametrize(("recipe", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_recipe(
    recipe: dict[str, Any], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**recipe, "output_dir": str(tmp_path / "out")}))
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_missing_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "recipes/nothing.yaml"]) == 2
    assert "recipes/nothing.yaml" in capsys.readouterr().err


def test_output_folder_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text(json.dumps({"name": "older", "fingerprint": "0"}))
    (out / "metrics.jsonl").write_text('{"step": 1}\n')  # it has begun
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "output_dir": str(out)}))
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "older" in error
    assert "--overwrite" in error
    assert "output_dir" in error


def test_unreadable_golds_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": f"What is {i}?", "gold_answer": "" if i % 2 else str(i), "solution": "no answer here"}
        for i in range(1, 9)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "\n".join(json.dumps({"problem": r["question"], "gold_answer": r["gold_answer"] or "???"}) for r in rows)
    )
    file = tmp_path / "recipe.yaml"
    recipe = {**GOOD, "data": {"loader": "math", "source": str(data)}, "output_dir": str(tmp_path / "out")}
    file.write_text(yaml.safe_dump(recipe))
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "solution" in error
    assert "unusable" in error or "cannot be scored" in error


def test_a_tracker_that_is_not_installed_is_said_before_the_cold_start(tmp_path: Path) -> None:
    """A RuntimeError of transformers with its traceback, after cold start and first evaluation."""
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    from grpo_lab.pipelines.train import train
    from grpo_lab.recipe.sections import recipe_from

    missing = sorted({"clearml", "comet_ml", "wandb"} - set(get_available_reporting_integrations()))
    if not missing:
        pytest.skip("all trackers are installed")
    given = {**GOOD, "report_to": missing[0], "output_dir": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=rf"`report_to` names '{missing[0]}', which is not installed"):
        train(recipe_from(given))
    assert not (tmp_path / "out").exists()
