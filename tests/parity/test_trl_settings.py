"""TRL's settings of the loss and of advantages beside ``objective``: the run is stock TRL's own (issue S, must show 2).

Dead groups are in the data, so rows are left out where that is exact, and computed where a bonus acts on them. As
drop-ins, with every metric: ``test_drop_in.py``. On two ranks: ``distributed/test_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from parity.harness import (
    LENGTHS,
    Run,
    arguments,
    assert_same_movement,
    mixed_reward,
    movement_bound,
    movement_difference,
    train,
    weight_difference,
)
from parity.sampler import NoisySampler, as_with_vllm


@dataclass(frozen=True)
class Way:
    """How a training runs: settings of both, settings of ours, arguments of the trainers, what is done to them."""

    both: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    options: Callable[[Path], dict[str, Any]] = lambda model: {}
    prepare: Callable[[Any], None] | None = None


def adapter(model: Path) -> dict[str, Any]:
    return {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"])}


def sampled_elsewhere(model: Path) -> dict[str, Any]:
    sampler = NoisySampler(AutoModelForCausalLM.from_pretrained(model))
    return {"rollout": ScriptedRollout(range(20, 90), LENGTHS, end_id=1, truncated_share=0.2, sampler_logps=sampler)}


SHARED = {"update": {"share_prompts": "on", "max_tokens": 400}}
WAYS = {
    "reused, KL": Way({"num_iterations": 2, "beta": 0.04}),
    "shared prompts": Way(ours=SHARED),
    "LoRA": Way({"num_iterations": 2}, SHARED, adapter),
    "sampler": Way(
        {"vllm_importance_sampling_mode": "token_truncate", "steps_per_generation": 6, "beta": 0.04},
        options=sampled_elsewhere,
        prepare=as_with_vllm,
    ),
}
STEERED = {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_coef_delta": 0.01, "entropy_coef_max": 0.035}
#: settings of TRL's → the objective of ours beside which they stand, and what TRL calls it
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "off-policy mask": ("grpo", "grpo", {"off_policy_mask_threshold": 1e-3}),
    "entropy bonus": ("dapo", "dapo", {"entropy_coef": 0.05}),
    "steered": ("grpo", "grpo", {**STEERED, "entropy_target": 9.0}),
    "steered, not needed": ("grpo", "grpo", {**STEERED, "entropy_target": 1.0}),
    "top entropy": ("dapo", "dapo", {"top_entropy_quantile": 0.4}),
    "all three": (
        "grpo",
        "grpo",
        {**STEERED, "entropy_target": 9.0, "top_entropy_quantile": 0.4, "off_policy_mask_threshold": 1e-3},
    ),
    "normalize_then_sum": ("grpo", "grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
    "sapo": ("sapo", "sapo", {"sapo_temperature_neg": 2.0}),
    "luspo": ("luspo", "luspo", {"importance_sampling_level": "sequence", "epsilon": 2e-3, "learning_rate": 0.01}),
    "vespo": ("vespo", "vespo", {"vespo_k_pos": 1.5, "learning_rate": 0.02}),
}
QUICK = {("all three", "reused, KL"), ("vespo", "sampler"), ("off-policy mask", "sampler")}
CASES = [
    pytest.param(name, way, marks=pytest.mark.not_fast if (name, way) in QUICK else pytest.mark.slow)
    for name in SETTINGS
    for way in WAYS
]


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 30 for ids in completion_ids]


def trained(kind: Any, config: Any, way: Way, model: Path) -> Run:
    rewards = [mixed_reward(), length_reward] if config.multi_objective_aggregation != "sum_then_normalize" else None
    return train(kind, config, model, reward=rewards, prepare=way.prepare, **way.options(model))


@pytest.mark.thorough(
    cases=[f"{name}-sampler" for name in SETTINGS if name not in ("off-policy mask", "all three", "vespo", "sapo")]
    + [f"{name}-shared prompts" for name in SETTINGS if name != "all three"]
)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_beside_an_objective_it_is_trls(name: str, way: str, tiny_folder: Path, tmp_path: Path) -> None:
    objective, loss_type, settings = SETTINGS[name]
    how = WAYS[way]
    both = arguments(tmp_path, **{"learning_rate": 0.1, **how.both, **settings})
    stock = trained(GRPOTrainer, GRPOConfig(**both, loss_type=loss_type), how, tiny_folder)
    ours = trained(LabTrainer, LabConfig(**both, objective=objective, **how.ours), how, tiny_folder)
    weights, movement = weight_difference(ours, stock), movement_difference(ours, stock)
    print(f"{name}, {way}: weights differ by {weights:.1e}, movement by {movement:.1e} ({movement_bound(stock):.1e})")
    assert weights <= 1e-6
    assert_same_movement(ours, stock)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4, abs=1e-5)
    names = {
        "entropy_coef",
        *(["policy_loss"] if loss_type == "grpo" else []),
    }  # TRL's of dapo is a share of the step's
    logged = names & stock.history[0].keys()
    for mine, theirs in zip(ours.history[:-1], stock.history[:-1], strict=True):
        assert {name: mine[name] for name in logged} == pytest.approx({name: theirs[name] for name in logged}, abs=1e-5)
    live = [row["update/live_share"] for row in ours.history if "update/live_share" in row]
    acts_on_all = "entropy_coef" in settings or "beta" in how.both
    assert (min(live) == 1.0) is acts_on_all or name == "normalize_then_sum"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("luspo", "vespo", "steered, not needed")])
def test_without_the_setting_it_is_another_run(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    """A test of the test: the setting acts on this data."""
    objective, _, settings = SETTINGS[name]
    how = WAYS["sampler"]
    both = arguments(tmp_path, learning_rate=0.1, **how.both)
    with_it = trained(LabTrainer, LabConfig(**both, **settings, objective=objective), how, tiny_folder)
    changed = {
        "sapo": {"sapo_temperature_neg": 1.0},
        "normalize_then_sum": {"advantage": {"name": "gdpo", "epsilon": 1.0}},
    }
    without = trained(LabTrainer, LabConfig(**both, objective=objective, **changed.get(name, {})), how, tiny_folder)
    assert movement_difference(without, with_it) > 100 * movement_bound(with_it)
