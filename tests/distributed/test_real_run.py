"""Short real runs on 2 CPU ranks: ``accelerate launch --config_file recipes/accelerate/… scripts/train.py --config …``.

The one with DDP starts every process cold, as a team does. Nothing is scripted: real completions, a random model of
which a tenth of the vocabulary ends a completion (so that ranks finish generating at different times), the main job
from rows to report.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distributed.launch import ROOT, run_worker
from grpo_lab.evaluation import EvaluationResult
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.stages.held_out import evaluate_saved_model
from grpo_lab.testing import tiny_model

pytestmark = pytest.mark.slow
RECIPE: dict[str, Any] = {
    "name": "two-ranks",
    "data": {"loader": "word_problems", "split": "train", "n": 64, "seed": 0, "template": "chat"},
    "rewards": [
        {"name": "distributed.team_rewards:odd_share"},
        {"name": "distributed.team_rewards:shortest_of_the_odd"},
    ],
    "evaluation": {
        "data": {"loader": "word_problems", "split": "test", "n": 5, "seed": 0, "template": "chat"},
        "reward": {"name": "accuracy", "mode": "strict"},
        "before": False,
        "batch_size": 2,  # three blocks: a rank has one, and generates in vain with the other
        "every": 2,
    },
    "objective": "dr_grpo",
    "num_generations": 4,
    "max_completion_length": 24,
    "per_device_train_batch_size": 6,  # 12 rows a step: the middle group lies on both ranks
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1.0e-2,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_steps": 2,
    "ddp_find_unused_parameters": False,
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    model, tokenizer = tiny_model("qwen2", hidden_size=64, num_heads=2, num_layers=2, initializer_range=0.1)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 180)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(kind: str, start: Path, out: Path, *flags: str, **changes: Any) -> str:
    recipe = {**RECIPE, "model": {"path": str(start)}, "output_dir": str(out / "run"), **changes}
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    script = str(ROOT / "scripts" / "train")
    return run_worker(script, kind, 2, "--config", out / "recipe.yaml", *flags, cold=kind == "ddp")


def logged(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def moved(out: Path, start: Path) -> float:
    """Relative movement of the saved model; loading it in one process proves that it was saved whole."""
    from transformers import AutoModelForCausalLM

    new, old = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).state_dict() for f in (out / "run", start))
    gap = sum((new[name] - old[name]).square().sum() for name in old)
    return math.sqrt(gap / sum(value.square().sum() for value in old.values()))


def check(out: Path, start: Path) -> None:
    steps = logged(out)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert math.isfinite(row["loss"])
        assert 0.0 < row["grad_norm"] < 100.0
        assert row["completions/min_length"] < row["completions/max_length"] <= 24
        assert row["update/tokens_computed"] < row["update/tokens_stock"]
        assert row["rewards/shortest_of_the_odd/mean"] > 0.0
    assert moved(out, start) > 1e-3
    assert (out / "run" / "report.html").is_file()
    section = recipe_from({**RECIPE, "model": {"path": str(start)}}).evaluation
    assert section is not None
    for when, model in (("step_2", out / "run" / "checkpoint-2"), ("after", out / "run")):
        shared = EvaluationResult.read(out / "run" / "evaluation" / when)
        alone = evaluate_saved_model(str(model), section, None, use_cpu=True, seed=0, max_new_tokens=24)
        assert [one.completion for one in shared.greedy] == [one.completion for one in alone.greedy]
        assert len(shared.greedy) == 5
    assert {path.name for path in (out / "run").glob("checkpoint-*")} >= {"checkpoint-2", "checkpoint-4"}


@pytest.mark.thorough(but="fsdp2")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_trains_for_real(kind: str, start: Path, tmp_path: Path) -> None:
    run(kind, start, tmp_path)
    check(tmp_path, start)
