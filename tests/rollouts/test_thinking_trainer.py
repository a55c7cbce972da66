"""The thinking budget inside ``LabTrainer`` with transformers generation: a real float64 model and a float64 oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_lab import LabConfig
from grpo_lab.objectives import AGGREGATIONS
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.thinking_seam import ThinkingRollout
from rollouts.thinking_oracle import (
    STOP_TEXT,
    TappedTrainer,
    check_budget_is_obeyed,
    difference,
    odd_share,
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
            assert shares == [] and "tool_mask" not in step.batches[0]
        else:
            assert 0 < cut < 12, "a batch of one kind proves less"
            assert shares[number] == pytest.approx(cut / 12)
        found = difference(step.gradient, oracle(step, trainer.processing_class, budget))
        print(budget, step.aggregation, cut, found)
        assert found < 1e-6, step.aggregation
