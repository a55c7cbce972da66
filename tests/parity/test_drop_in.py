"""Change one import and nothing else changes (issue A, must show 9): with ``objective`` unset, ``LabTrainer`` gives the
same metrics and weights as stock TRL 1.16 on the same seed, for every option of ``GRPOConfig`` that runs on a CPU.

Completions come from the model itself (transformers' ``generate``), so a difference in any weight, random number or
batch shows in the next step's completions as well. Metrics (every value that stock logs) and weights: equal but for
float32 rounding, the bound from the number of steps and the size of weights and movement (``tolerance.py``).
``entropy`` is a mean over the rows that were computed; where rows with advantage 0 are skipped it is another mean than
stock's (docs/metrics.md), so such cases are compared twice: with ``dead_groups: keep`` all of it, with ``skip`` without
it.

Not here: what needs a GPU, a server or the hub (vLLM's engine, DeepSpeed, FSDP, quantisation, Liger, continuous
batching, hub uploads). The sampler correction runs on scripted completions with TRL's own code and no engine
(``parity/sampler.py``).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from parity.drop_in_cases import CASES, length_reward, logging_reward
from parity.harness import Run, assert_same_movement, movement_difference
from parity.stock_like import TIMED, Case, base_arguments, metric_bound, metric_differences, prompts, run, spread_reward


def params(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ()) for case in cases]


def assert_same(ours: Run, stock: Run, without: tuple[str, ...] = ()) -> None:
    assert metric_differences(ours, stock, without) == []
    assert ours.weights.keys() == stock.weights.keys()
    fixed = [name for name, value in stock.weights.items() if not value.is_floating_point()]
    assert all(torch.equal(ours.weights[name], stock.weights[name]) for name in fixed), "integers know no rounding"
    moved = max((value - stock.start[name]).abs().max().item() for name, value in stock.weights.items())
    assert moved > 0, "stock did not train: nothing was compared"
    assert_same_movement(ours, stock)


@pytest.mark.not_fast
@pytest.mark.parametrize("case", params(CASES))
def test_same_as_stock(case: Case, models: dict[str, Path], tmp_path: Path) -> None:
    stock = run(GRPOTrainer, GRPOConfig, case, models, tmp_path / "stock")
    variants: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [(LabConfig, {}, ())]
    if case.dead_rows:
        variants = [(LabConfig, {"update": {"dead_groups": "keep"}}, ()), (LabConfig, {}, ("entropy",))]
    if case.plain:
        variants.append((GRPOConfig, {}, ("entropy",) if case.dead_rows else ()))
    for number, (config, more, without) in enumerate(variants):
        ours = run(LabTrainer, config, case, models, tmp_path / f"ours{number}", **more)
        assert_same(ours, stock, without)
        reason = ours.trainer.algorithm.left_to_trl
        assert reason is None if case.left_to_trl is None else case.left_to_trl in reason


# -- what is no single training ----------------------------------------------------------------------------------------


STEERED = {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.1, "entropy_coef_delta": 0.02}
RESUMED = {"aligned": {}, "reused": {"steps_per_generation": 4, "beta": 0.1}, "steered entropy": STEERED}


@pytest.mark.slow
@pytest.mark.parametrize("changes", RESUMED.values(), ids=RESUMED)
def test_resume_from_a_checkpoint(changes: dict[str, Any], models: dict[str, Path], tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more: after resuming, ours goes on as stock does after resuming."""
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, **changes}
    first = Case("first", saving)
    again = Case("again", saving, lambda _: {"resume": "checkpoint-2"})
    stock = [run(GRPOTrainer, GRPOConfig, case, models, tmp_path / "stock") for case in (first, again)]
    ours = [run(LabTrainer, LabConfig, case, models, tmp_path / "ours") for case in (first, again)]
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine, theirs)


@pytest.mark.slow
def test_completions_table(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``log_completions``: the parquet tables hold the same texts, rewards, extra columns and advantages."""
    case = Case(
        "log",
        {"log_completions": True, "num_completions_to_print": 1, "log_unique_prompts": True},
        lambda _: {"reward_funcs": [logging_reward, length_reward]},
    )
    stock = run(GRPOTrainer, GRPOConfig, case, models, tmp_path / "stock")
    ours = run(LabTrainer, LabConfig, case, models, tmp_path / "ours")
    assert_same(ours, stock)
    names = sorted(path.name for path in (tmp_path / "stock" / "completions").iterdir())
    assert len(names) == 3  # one a step
    for name in names:
        mine, theirs = (pd.read_parquet(tmp_path / who / "completions" / name) for who in ("ours", "stock"))
        assert {"first_token", "advantage", "logging_reward", "length_reward"} <= set(theirs.columns)
        pd.testing.assert_frame_equal(mine, theirs, rtol=metric_bound(steps=3), atol=metric_bound(steps=3))


@pytest.mark.slow
def test_evaluate_and_predict_outside_of_training(models: dict[str, Path], tmp_path: Path) -> None:
    """``trainer.evaluate()`` before any step gives stock's metrics."""
    found = []
    for trainer_class, config in ((GRPOTrainer, GRPOConfig), (LabTrainer, LabConfig)):
        settings = {**base_arguments(tmp_path), "per_device_eval_batch_size": 4, "beta": 0.1}
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(models["text"], dtype=torch.float32),
            reward_funcs=spread_reward,
            args=config(**settings),
            eval_dataset=prompts(3),
            train_dataset=prompts(4),
            processing_class=AutoTokenizer.from_pretrained(models["text"]),
        )
        found.append(trainer.evaluate())
    stock, ours = found
    bound = metric_bound(steps=1)
    for name, value in stock.items():
        if not name.endswith(TIMED):
            assert ours[name] == pytest.approx(value, rel=bound, abs=bound), name


def own_surrogate(batch: Any) -> Any:
    return -2.0 * batch.advantages * batch.ratio


@pytest.mark.slow
def test_own_objective_on_a_mixture_of_experts(models: dict[str, Path], tmp_path: Path) -> None:
    """The load-balancing loss is added to the objective that was configured, not to TRL's."""
    case = Case("moe", {"router_aux_loss_coef": 0.05, "loss_type": "dapo"}, model="moe")
    stock = run(GRPOTrainer, GRPOConfig, case, models, tmp_path)
    draws, own = {"rollout": {"generate": "stock"}}, {"name": "dapo", "surrogate": own_surrogate}
    plain = run(LabTrainer, LabConfig, case, models, tmp_path, objective="dapo", **draws)
    doubled = run(LabTrainer, LabConfig, case, models, tmp_path, objective=own, **draws)
    assert_same_movement(plain, stock)
    first, theirs = doubled.history[0], stock.history[0]
    aux = 0.05 * theirs["aux_loss"]
    bound = metric_bound(steps=1)
    assert first["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=bound)
    assert abs(theirs["loss"] - aux) > 100 * bound, "a surrogate that is not doubled would be lost in rounding"
    assert first["loss"] - aux == pytest.approx(2 * (theirs["loss"] - aux), abs=2 * bound)  # a mean of |Â| ≤ 2, doubled
    assert movement_difference(doubled, stock) > 0.1


@pytest.mark.not_fast
def test_a_difference_would_be_noticed(models: dict[str, Path], tmp_path: Path) -> None:
    """A test of the test: another learning rate, and a reward that is 1e-3 higher."""
    case = Case("base")
    stock = run(GRPOTrainer, GRPOConfig, case, models, tmp_path)
    faster = run(LabTrainer, LabConfig, Case("faster", {"learning_rate": 0.301}), models, tmp_path)
    with pytest.raises(AssertionError):
        assert_same(faster, stock)
    higher = Case("higher", {}, lambda _: {"reward_funcs": functools.partial(shifted_reward)})
    assert any(
        "reward is" in line for line in metric_differences(run(LabTrainer, LabConfig, higher, models, tmp_path), stock)
    )


def shifted_reward(**columns: Any) -> list[float]:
    return [value + 1e-3 for value in spread_reward(**columns)]
