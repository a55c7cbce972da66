"""What a recipe may hold beside model, rows and rewards: callbacks, tools, an environment, rows to evaluate on, reward
models.

Each as a real run of two steps, by the module of a team in the working folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from grpo_lab.evaluation import EvaluationResult
from grpo_lab.pipelines.dry_run import plan_of_training as dry_run
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.stages.held_out import evaluate_saved_model
from grpo_lab.testing import tiny_model

pytestmark = pytest.mark.slow

TEAM = '''
from transformers import TrainerCallback

class Remember(TrainerCallback):
    steps = []
    def __init__(self, factor: int = 1):
        self.factor = factor
    def on_step_end(self, args, state, control, **_):
        self.steps.append(self.factor * state.global_step)

def vowels(completions, **_):
    return [sum(c in "aeiou" for c in str(text)) / 10 for text in completions]

def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: first factor
        b: second factor

    Returns:
        The product.
    """
    return a * b

class Counter:
    built = 0
    def __init__(self, start: int = 0):
        type(self).built += 1
        self.total = start
    def reset(self, **_) -> str:
        return f" Start at {self.total}."
    def add(self, a: int) -> str:
        """Adds to the total.

        Args:
            a: what is added

        Returns:
            The total.
        """
        self.total += a
        return str(self.total)
    def get_reward(self) -> float:
        return float(self.total)
'''
GOOD: dict[str, Any] = {
    "name": "parts",
    "model": {"tiny": {"hidden_size": 16, "num_layers": 1, "initializer_range": 0.2}},
    "data": {"loader": "word_problems", "n": 8},
    "rewards": ["recipe_team:vowels"],
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_completion_length": 6,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "recipe_team.py").write_text(TEAM)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("recipe_team", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def run(**changes: Any) -> list[dict[str, Any]]:
    """The run's logged lines. The dry run must have nothing against it."""
    recipe = recipe_from({**GOOD, **changes, "output_dir": "out"})
    dry_run(recipe)
    train(recipe)
    assert json.loads(Path("out/run.json").read_text())["finished"] is True
    return [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]


def with_tools() -> dict[str, Any]:
    """A tiny model whose tokenizer has Qwen3's chat template, which TRL knows how to read tool calls from."""
    import trl

    model, tokenizer = tiny_model(hidden_size=16, num_layers=1, max_positions=1024)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    model.save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    return {"model": {"path": "policy"}, "chat_template_kwargs": {"enable_thinking": False}}


def test_a_callback_with_its_arguments() -> None:
    run(callbacks=[{"name": "recipe_team:Remember", "factor": 10}])
    assert sys.modules["recipe_team"].Remember.steps == [10, 20]


def test_rows_to_evaluate_on_during_training() -> None:
    """`eval_strategy: steps` could be written, and no recipe could satisfy it."""
    lines = run(eval_dataset={"loader": "word_problems", "split": "test", "n": 4}, eval_strategy="steps", eval_steps=1)
    assert [line["step"] for line in lines if "eval_reward" in line] == [1, 2]


def test_held_out_answers_on_the_way_change_nothing_and_are_the_policy_s() -> None:
    """`evaluation/step_<n>` was read by reports and written by nothing."""
    section = {"data": {"loader": "word_problems", "split": "test", "n": 3}, "batch_size": 2, "before": False}
    section["log_probs"] = True
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "learning_rate": 0.05}

    def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: one for name, one in line.items() if "time" not in name} for line in lines]

    plain = timeless(run(evaluation=section, **saved))
    shutil.rmtree("out")
    assert timeless(run(evaluation={**section, "every": 1}, **saved)) == plain
    assert not Path("out/evaluation/step_3").exists()  # that is `after`
    held_out = recipe_from({**GOOD, "evaluation": section}).evaluation
    assert held_out is not None
    texts = []
    for step in (1, 2):
        on_the_way = EvaluationResult.read(f"out/evaluation/step_{step}")
        how: Any = {"use_cpu": True, "seed": 0, "max_new_tokens": 6}
        alone = evaluate_saved_model(f"out/checkpoint-{step}", held_out, None, **how)
        assert [replace(one, log_prob=0) for one in on_the_way.outcomes] == [
            replace(one, log_prob=0) for one in alone.outcomes
        ]
        told = [[one.log_prob for one in found.outcomes] for found in (on_the_way, alone)]
        assert told[0] == pytest.approx(told[1], rel=1e-5)  # TRL's model has its head fused
        texts.append([one.completion for one in on_the_way.greedy])
    assert texts[0] != texts[1]
    assert "step 2" in Path("out/report.html").read_text()  # a point of the curve


def test_a_reward_model_beside_a_function() -> None:
    _, tokenizer = tiny_model(hidden_size=16, num_layers=1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, num_key_value_heads=2, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1
    )
    Qwen2ForSequenceClassification(config).save_pretrained("judges/scorer")
    tokenizer.save_pretrained("judges/scorer")
    AutoTokenizer.from_pretrained("judges/scorer")
    lines = run(rewards=["recipe_team:vowels", {"name": "judges/scorer", "weight": 0.5}])
    names = {name for line in lines for name in line if name.startswith("rewards/") and name.endswith("/mean")}
    assert len(names) == 2
    assert all(line[name] == line[name] for line in lines for name in names if name in line)


def test_tools() -> None:
    lines = run(**with_tools(), tools=["recipe_team:multiply"])
    assert all("tools/call_frequency" in line for line in lines if "reward" in line)


def test_an_environment_that_rewards() -> None:
    lines = run(**with_tools(), rewards=[], environment_factory={"name": "recipe_team:Counter", "start": 3})
    assert sys.modules["recipe_team"].Counter.built > 0
    assert [line["reward"] for line in lines if "reward" in line] == [3.0, 3.0]
