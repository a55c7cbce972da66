"""The thinking budget inside ``LabTrainer`` on a real vLLM engine, importance correction on, against the float64
oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from grpo_lab import LabConfig
from rollouts.checkpoints import servable
from rollouts.server_runs import odd_share
from rollouts.thinking_oracle import (
    AGGREGATIONS,
    TappedTrainer,
    check_budget_is_obeyed,
    difference,
    oracle,
    questions,
    run,
    settings,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def build(folder: Path, budget: int | None, **changes: Any) -> TappedTrainer:
    model = servable(folder / "model", initializer_range=0.1)
    written = settings(folder / "out", budget, use_vllm=True, vllm_mode="colocate", **changes)
    written["rollout"] |= {"verify_every": 1, "engine": {"kv_cache_gib": 0.25, "max_model_len": 160}}
    return TappedTrainer(model=model, reward_funcs=odd_share, args=LabConfig(**written), train_dataset=questions())


@pytest.mark.thorough(but="8")
@pytest.mark.parametrize("budget", [0, 8, 32, None])
def test_gradient_is_the_oracles(budget: int | None, tmp_path: Path) -> None:
    """The trainer is float32 and the oracle float64: 2e-5. Its sampler weight leaves inserted tokens (NaN) out."""
    trainer = build(tmp_path, budget)
    steps = run(trainer)
    assert [step.aggregation for step in steps] == list(AGGREGATIONS)
    history = trainer.state.log_history
    shares = [row["rollout/cut_share"] for row in history if "rollout/cut_share" in row]
    assert max(row["rollout/sync_gap"] for row in history if "rollout/sync_gap" in row) < 1e-4
    for number, step in enumerate(steps):
        cut = check_budget_is_obeyed(step, trainer.processing_class, budget)
        if budget is not None:
            assert 0 < cut < 12, "a batch of one kind proves less"
            assert shares[number] == pytest.approx(cut / 12)
        found = difference(step.gradient, oracle(step, trainer.processing_class, budget))
        print(budget, step.aggregation, cut, found)
        assert found < 2e-5, step.aggregation
