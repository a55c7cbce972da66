"""The thinking budget inside ``LabTrainer`` with transformers generation: a real float64 model and a float64 oracle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from trl.trainer import grpo_trainer

from grpo_lab import LabConfig
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.generation.in_step import ThinkingRollout
from rollouts import trajectory_runs
from rollouts.server_runs import odd_share
from rollouts.thinking_oracle import (
    AGGREGATIONS,
    STOP_TEXT,
    TappedTrainer,
    check_budget_is_obeyed,
    difference,
    oracle,
    questions,
    run,
    settings,
)

BUDGETS = [0, 8, 32, None]


def build(folder: Path, budget: int | None, **changes: Any) -> TappedTrainer:
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_heads=2, num_layers=2, initializer_range=0.2)
    return TappedTrainer(
        model=model.double(),
        reward_funcs=odd_share,
        args=LabConfig(**settings(folder, budget, **changes)),
        train_dataset=questions(),
        processing_class=tokenizer,
    )


@pytest.mark.thorough(but=["8", "None"])
@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_gradient_is_the_oracles(budget: int | None, tmp_path: Path) -> None:
    """Every aggregation in turn; inserted tokens are context and nothing else, in sums and in denominators."""
    trainer = build(tmp_path, budget)
    steps = run(trainer)
    assert [step.aggregation for step in steps] == list(AGGREGATIONS)
    shares = [row["rollout/cut_share"] for row in trainer.state.log_history if "rollout/cut_share" in row]
    for number, step in enumerate(steps):
        cut = check_budget_is_obeyed(step, trainer.processing_class, budget)
        if budget is None:
            assert shares == []
            assert "tool_mask" not in step.batches[0]
        else:
            assert 0 < cut < 12, "a batch of one kind proves less"
            assert shares[number] == pytest.approx(cut / 12)
        found = difference(step.gradient, oracle(step, trainer.processing_class, budget))
        print(budget, step.aggregation, cut, found)
        assert found < 3e-6, step.aggregation  # TRL's head makes float32 log-probs


@pytest.mark.slow
def test_a_lost_mask_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: with loss on the inserted tokens the gradient is another one."""
    lost = ThinkingRollout.__call__

    def everything_counts(self: ThinkingRollout, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = lost(self, prompts, trainer)
        return {**made, "env_mask": [[1] * len(ids) for ids in made["completion_ids"]]}

    monkeypatch.setattr(ThinkingRollout, "__call__", everything_counts)
    trainer = build(tmp_path, 8, max_steps=1)
    (step,) = run(trainer)
    assert difference(step.gradient, oracle(step, trainer.processing_class, 8)) > 1e-2


@pytest.mark.parametrize(
    ("rollout", "changes", "message"),
    [
        ({"thinking_budget": -1}, {}, "`rollout.thinking_budget` is -1"),
        ({"thinking_budget": 64}, {}, "`max_completion_length` is 64"),
        ({"thinking_budget": 8, "budget_text": "no end"}, {}, "budget_text must contain '</think>'"),
        ({"budget_text": STOP_TEXT}, {}, "has an effect only with `rollout.thinking_budget`"),
        ({"thinking_budget": 8}, {"generation_kwargs": {"max_new_tokens": 3}}, "`generation_kwargs.max_new_tokens`"),
    ],
)
def test_bad_settings_are_named(rollout: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(tmp_path, None, **{**changes, "rollout": rollout})


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"top_p": 0.9}, "`top_p`=0.9"),
        ({"top_k": 65}, "`top_k`=65"),
        ({"min_p": 0.05}, "`min_p`=0.05"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty`=1.1"),
        ({"generation_kwargs": {"top_p": 0.9}}, "`generation_kwargs.top_p`=0.9"),
    ],
)
def test_sampling_that_the_correction_cannot_correct_is_refused(
    changes: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    written = settings(tmp_path, None, use_vllm=True, **changes)
    with pytest.raises(ValueError, match=re.escape(setting)):
        LabConfig(**written)
    LabConfig(**{**written, "vllm_importance_sampling_correction": False})
    LabConfig(**settings(tmp_path, None, **changes))  # without an engine there is nothing to correct


@pytest.mark.parametrize(
    "engine", [{}, {"use_vllm": True}, {"use_vllm": True, "vllm_importance_sampling_correction": False}]
)
def test_a_temperature_that_is_not_the_trainer_s_is_refused_with_any_engine(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    """Drawn at one temperature, log-probs at another; with the correction off nothing would show it."""
    with pytest.raises(ValueError, match=r"`generation_kwargs\.temperature` is 0\.5 and `temperature` is 1\.0"):
        LabConfig(**settings(tmp_path, None, generation_kwargs={"temperature": 0.5}, **engine))


@pytest.mark.slow
def test_each_turn_has_a_budget_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``rollout.turns`` without an engine."""
    monkeypatch.setattr(grpo_trainer, "parse_response", trajectory_runs.parsed)
    model = trajectory_runs.saved_model(tmp_path / "model")
    rollout = {"thinking_budget": trajectory_runs.THINKING, "budget_text": trajectory_runs.STOP_THINKING}
    changes = {"use_vllm": False, "max_steps": 1, "max_tool_calling_iterations": 3}
    trainer = trajectory_runs.build(model, tmp_path / "out", {}, rollout, **changes)
    trainer.train()
    assert {0, 1} <= set(trajectory_runs.cut_turns(trainer))
