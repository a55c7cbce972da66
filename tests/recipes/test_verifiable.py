"""The recipes of made coding tasks, games and proofs: two optimizer steps of each, from the cold start to the
report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_lab.recipe.sections import read_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "verifiable"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["code", "countdown", "proofs"])
def test_two_steps(name: str, tmp_path: Path) -> None:
    from grpo_lab.pipelines.train import train

    changes = {
        "output_dir": str(tmp_path / "run"),
        "model.tiny.hidden_size": 32,
        "model.tiny.num_heads": 2,
        "model.tiny.num_layers": 1,
        "data.n": 8,
        "cold_start.data.n": 8,
        "cold_start.max_steps": 2,
        "cold_start.per_device_train_batch_size": 4,
        "evaluation.data.n": 4,
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "max_steps": 2,
    }
    outcome = train(read_recipe(RECIPES / f"{name}.yaml", changes))
    assert outcome.after is not None
    assert outcome.after.n_problems == 4
    logged = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row for row in logged if any(key.startswith("rewards/") for key in row)]
    assert len(rewards) >= 2
    reward = {"code": "code_reward", "countdown": "countdown_reward", "proofs": "proof_reward"}[name]
    assert all(0.0 <= row[f"rewards/{reward}/mean"] <= 1.0 for row in rewards)
    if name == "code":
        assert any(row.get("code_reward/walls") for row in logged)  # what is in force is in the log
    assert outcome.report is not None
