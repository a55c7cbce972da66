"""``advantage: process`` through the real trainer: the update against loops in float64, outcome GRPO as the special
case to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.pipelines.dry_run import plan_of_training as dry_run
from grpo_lab.pipelines.train import train as pipeline
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.rewards import EquationSteps, TokenClassificationSteps, step_reward, steps_as_outcome
from parity.harness import LENGTHS, Kept, Run, arguments, assert_same_movement, mixed_reward, problems, train
from process_oracle import LR, PROCESS, literal, ragged_steps, replayed, scored
from step_judge import saved_judge


@step_reward
def one_step(prompts: Any, completions: Any, completion_ids: Any, number: Any, **_: Any) -> Any:
    values = mixed_reward()(prompts, completion_ids, number)
    return [[(len(ids) - 1, value)] for ids, value in zip(completion_ids, values, strict=True)]


def run(folder: Path, model: Path, rewards: Any, objective: Any = PROCESS, **settings: Any) -> Run:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rollout = Kept(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2)
    config = LabConfig(**arguments(folder, learning_rate=LR, objective=objective, **settings))
    return train(LabTrainer, config, model, rollout=rollout, reward=rewards)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "off"])
def test_against_loops_in_float64(update: str, tiny_folder: Path, tmp_path: Path) -> None:
    """One update a generation; two, resumed between them, on 1, 2 and 4 ranks:
    ``tests/distributed/test_process_ranks.py``."""
    ours = run(tmp_path, tiny_folder, [ragged_steps], update=update, max_steps=4)
    expected = replayed(tiny_folder, ours.trainer.rollout_func.batches, 1)
    assert_same_movement(ours, Run([], [], expected, ours.start, [{"step": 4}], None))
    assert len(ours.trainer.rollout_func.batches) == 4
    assert "rewards/ragged_steps/mean" in ours.history[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"update": "off"},
        {"num_iterations": 2},
        {"beta": 0.04},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    ],
    ids=str,
)
def test_one_step_a_completion_is_outcome_grpo_to_the_bit(
    settings: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    process = run(tmp_path, tiny_folder, [one_step], **settings)
    outcome = run(tmp_path, tiny_folder, [mixed_reward()], "grpo", **settings)
    assert process.losses == outcome.losses
    assert all(torch.equal(value, outcome.weights[name]) for name, value in process.weights.items())
    dead = [row["groups/dead_share"] for row in process.history if "groups/dead_share" in row]
    assert dead == [row["groups/dead_share"] for row in outcome.history if "groups/dead_share" in row]
    if "beta" not in settings and settings.get("update") != "off":
        assert min(row["update/live_share"] for row in process.history if "update/live_share" in row) < 1


@pytest.mark.slow
def test_a_mixture_is_the_sum(tiny_folder: Path, tmp_path: Path) -> None:
    """Steps twice as heavy, beside an outcome: Â = 2·process + z-score of the outcome, at every token."""
    seen: list[torch.Tensor] = []

    class Looks(LabTrainer):
        def token_loss(self, batch: Any) -> Any:
            if batch.logps.dtype == torch.float32:
                seen.append(batch.advantages.clone())
            return super().token_loss(batch)

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    settings = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=1, objective=PROCESS, update="off")
    config = LabConfig(**settings, reward_weights=[2.0, 1.0])
    rollout = Kept(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id)
    done = train(Looks, config, tiny_folder, rollout=rollout, reward=[ragged_steps, mixed_reward(0)])
    ((_, completions),) = rollout.batches
    number = done.trainer.train_dataset["number"]
    assert len(set(number)) == 12
    rewards = [(sum(ids) % 5) / 4.0 for ids in completions]
    steps = literal([scored(ids) for ids in completions], [len(ids) for ids in completions])
    outcome = literal([[(len(ids) - 1, r)] for ids, r in zip(completions, rewards)], [len(ids) for ids in completions])
    expected = sorted([round(2 * a + b, 4) for a, b in zip(row, other)] for row, other in zip(steps, outcome))
    (found,) = seen
    lengths = {len(ids) for ids in completions}
    rows = sorted([round(value, 4) for value in row] for row in found.tolist())
    assert max(lengths) == found.size(1)
    for row in expected:
        assert any(all(abs(a - b) < 2e-4 for a, b in zip(row, other)) for other in rows), row


@pytest.mark.not_fast
def test_resample_and_metrics_know_dead_steps(tiny_folder: Path, tmp_path: Path) -> None:
    """Groups whose steps all score alike are dead, whatever the mean; resampling fills the batch with others."""
    done = run(tmp_path, tiny_folder, [one_step], update={"dead_groups": "resample", "max_rounds": 8}, max_steps=2)
    assert max(row["update/resample_rounds"] for row in done.history if "update/resample_rounds" in row) > 1


@pytest.mark.not_fast
def test_nan_scores_are_counted_and_said(tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They were in no `rewards/nan_share`. And two rewards of one name share a log entry: said at the start."""

    @step_reward
    def one_step(completion_ids: Any, number: Any, **_: Any) -> Any:
        return [[(len(ids) - 1, float("nan") if n % 2 else float(n))] for ids, n in zip(completion_ids, number)]

    done = run(tmp_path, tiny_folder, [one_step, steps_as_outcome(one_step)], max_steps=1)
    numbers = [done.trainer.train_dataset["number"][i] for i in range(len(done.trainer.train_dataset))]
    assert any(n % 2 for n in numbers)
    assert 0 < done.history[0]["rewards/nan_share"] <= 0.5  # the other reward answers None
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "reward 'one_step' returned NaN for " in said
    assert "2 rewards are called 'one_step'" in said


@pytest.mark.slow
def test_equation_steps_get_the_runs_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    reward = EquationSteps()
    done = run(tmp_path, tiny_folder, [reward], max_steps=1)
    assert reward.tokenizer is done.trainer._tokenizer
    assert "rewards/equation_steps/mean" in done.history[0]


@pytest.mark.parametrize(
    ("rewards", "objective", "words"),
    [
        ([ragged_steps], "grpo", "advantage: process"),
        ([mixed_reward()], PROCESS, "no reward scores steps"),
        ([ragged_steps], None, "advantage: process"),
    ],
)
def test_one_without_the_other(rewards: Any, objective: Any, words: str, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        run(tmp_path, tiny_folder, rewards, objective)


@pytest.mark.slow
def test_as_an_outcome_anywhere(tiny_folder: Path, tmp_path: Path) -> None:
    done = run(tmp_path, tiny_folder, [steps_as_outcome(ragged_steps)], "grpo", max_steps=1)
    assert "rewards/ragged_steps/mean" in done.history[0]
    assert len(problems()) == 12


@pytest.mark.slow
def test_a_reward_model_scores_the_steps(tiny_folder: Path, tmp_path: Path) -> None:
    """In its own tokens, beside an outcome in ours; as an outcome in stock TRL. The logged mean is that of its
    scores."""
    judge = TokenClassificationSteps(saved_judge(tmp_path / "judge"), split=every_nine)
    given = {"max_steps": 1, "gradient_accumulation_steps": 1, "reward_weights": [0.5, 1.0]}
    done = run(tmp_path, tiny_folder, [judge, mixed_reward()], **given)
    tokenizer = done.trainer._tokenizer
    assert judge.tokenizer is tokenizer
    row = done.history[0]
    assert row["token_classification_steps/beyond_share"] == 0
    (((_, completions)),) = done.trainer.rollout_func.batches
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    prompts = done.trainer._tokenizer.batch_decode(done.trainer.rollout_func.batches[0][0])
    scores = steps_as_outcome(judge)(prompts, texts, completion_ids=completions)
    logged = row["rewards/token_classification_steps/mean"]
    assert logged == pytest.approx(sum(scores) / len(scores), abs=1e-5)
    assert any(not torch.equal(value, done.start[name]) for name, value in done.weights.items())

    alone = TokenClassificationSteps(tmp_path / "judge", split=every_nine, tokenizer=tokenizer)
    settings = arguments(tmp_path / "stock", max_steps=1, gradient_accumulation_steps=1)
    stock = train(GRPOTrainer, GRPOConfig(**settings), tiny_folder, reward=[steps_as_outcome(alone)])
    assert stock.history[0]["rewards/token_classification_steps/mean"] == pytest.approx(logged, abs=1e-5)


def every_nine(text: str) -> list[int]:
    """Random tokens hold no lines: a step every nine characters."""
    return [*range(9, len(text), 9), len(text)] if text.strip() else []


@pytest.mark.slow
def test_a_mixture_from_a_recipe(tmp_path: Path) -> None:
    judge = saved_judge(tmp_path / "judge")
    rewards = [
        {"name": "accuracy", "mode": "strict"},
        {"name": "equation_steps", "weight": 0.25},
        {
            "name": "token_classification_steps",
            "weight": 0.5,
            "model": str(judge),
            "column": "question",
            "batch_size": 4,
        },
    ]
    recipe = {
        "name": "process", "model": {"tiny": {"hidden_size": 16, "num_layers": 1, "initializer_range": 0.2}},
        "data": {"loader": "word_problems", "n": 8, "template": "chat"}, "rewards": rewards, "objective": PROCESS,
        "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 6, "max_steps": 1,
        "logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": False, "use_cpu": True, "bf16": False,
        "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    facts = dry_run(recipe_from(recipe))
    assert "process" in facts["algorithm"]
    pipeline(recipe_from(recipe))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    named = {name.split("/")[1] for name in rows[0] if name.startswith("rewards/") and name.endswith("/mean")}
    assert named >= {"accuracy_reward", "token_classification_steps"}
    with pytest.raises(ValueError, match="advantage: process"):
        dry_run(recipe_from({**recipe, "objective": "grpo", "output_dir": str(tmp_path / "other")}))
