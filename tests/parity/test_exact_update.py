"""The exact update gives stock's weights whatever the shape of the step: losses and movement (weights minus start)
within what float32 allows for sums in another order (``tolerance.py``)."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer.step import exact_update
from parity.harness import (
    LENGTHS,
    STOCK,
    Run,
    adamw_bound,
    arguments,
    by_name,
    movement_bound,
    movement_difference,
    train,
    weight_difference,
)
from tolerance import loss_gap, two_walks

#: terms of size 1 (|Â| ≤ 1, ratios near it), at most 12 rows of 30 tokens in four steps
LOSS = loss_gap(torch.float32, terms=1.0, additions=12 * 30, steps=4)
#: TRL's head rounds log-probs to float32 in a float64 model: once, and not in a sum
FLOAT64 = 6.0 * two_walks(torch.float32, 4)
#: bnpo's average is that of a micro-batch, which no bin is
BINNED = [name for name in STOCK if name != "bnpo"]


def rollout(tiny: Path, lengths: tuple[int, ...] = LENGTHS, truncated: float = 0.2) -> ScriptedRollout:
    end = AutoTokenizer.from_pretrained(tiny).eos_token_id
    return ScriptedRollout(range(20, 90), lengths, end_id=end, truncated_share=truncated)


def ours(
    tiny: Path, out: Path, preset: str = "dr_grpo", lengths: tuple[int, ...] = LENGTHS, truncated: float = 0.2,
    reward: Any = None, **changes: Any,
) -> Run:  # fmt: skip
    """Objective by name, exact update."""
    config = LabConfig(**arguments(out, **{**by_name(preset), **changes}))
    return train(LabTrainer, config, tiny, rollout=rollout(tiny, lengths, truncated), reward=reward)


@functools.cache
def stock(
    tiny: Path, preset: str = "dr_grpo", lengths: tuple[int, ...] = LENGTHS, truncated: float = 0.2, reward: Any = None,
    **changes: Any,
) -> Run:  # fmt: skip
    """TRL with the same settings; each of them is trained once."""
    config = GRPOConfig(**arguments(tiny.parent / "stock", **changes), **STOCK[preset])
    run = train(GRPOTrainer, config, tiny, rollout=rollout(tiny, lengths, truncated), reward=reward)
    run.trainer = None
    return run


def check_equal(found: Run, expected: Run) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=LOSS, abs=0.1 * LOSS)
    assert movement_difference(found, expected) <= movement_bound(expected)


SHAPES: dict[str, dict[str, Any]] = {
    "one micro-batch": {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1},
    "six micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6},
    "generation outlives a step": {"steps_per_generation": 6, "gradient_accumulation_steps": 3},
    "several generations a step": {
        "per_device_train_batch_size": 4, "steps_per_generation": 1, "gradient_accumulation_steps": 3,
    },
    "two passes over a batch": {"num_iterations": 2},
    "truncated masked": {"mask_truncated_completions": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "clipped gradients": {"max_grad_norm": 0.1},
    "KL in the loss": {"beta": 0.04},
}  # fmt: skip


@pytest.mark.not_fast(cases="*-dr_grpo")
@pytest.mark.thorough(but=["*-gspo", "*-dr_grpo"])
@pytest.mark.parametrize(
    "preset", [name if name == "dr_grpo" else pytest.param(name, marks=pytest.mark.slow) for name in BINNED]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape_of_the_step(shape: str, preset: str, tiny_folder: Path, tmp_path: Path) -> None:
    check_equal(ours(tiny_folder, tmp_path, preset, **SHAPES[shape]), stock(tiny_folder, preset, **SHAPES[shape]))


@pytest.mark.not_fast
def test_completions_of_one_token(tiny_folder: Path, tmp_path: Path) -> None:
    short: dict[str, Any] = {"lengths": (1,), "truncated": 1.0}
    check_equal(ours(tiny_folder, tmp_path, **short), stock(tiny_folder, **short))


@pytest.mark.not_fast
def test_all_truncated_and_masked_is_a_step_on_zero_gradients(tiny_folder: Path, tmp_path: Path) -> None:
    masked: dict[str, Any] = {"truncated": 1.0, "mask_truncated_completions": True}
    found = ours(tiny_folder, tmp_path, **masked)
    expected = stock(tiny_folder, **masked)
    assert weight_difference(found, expected) == 0.0
    assert movement_difference(found, expected) == 0.0
    assert found.losses == expected.losses == [0.0] * 4


def dead_after_first(number: list[int], completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    return [1.0 if trainer_state.global_step else float(sum(ids) % 3) for ids in completion_ids]


@pytest.mark.not_fast
def test_no_live_row_still_steps_as_stock(tiny_folder: Path, tmp_path: Path) -> None:
    """Momentum and weight decay go on moving the weights on zero gradients; skipping the optimizer would not."""
    changes = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1, "reward": dead_after_first}
    found = ours(tiny_folder, tmp_path, **changes)
    expected = stock(tiny_folder, **changes)
    assert found.grad_norms[1:] == [0.0] * 3
    assert movement_difference(found, expected) <= adamw_bound(expected)
    only_first = ours(tiny_folder, tmp_path, max_steps=1, **changes)
    assert weight_difference(found, only_first) > 1e-3


def one_winner(prompts: list[str], **_: Any) -> list[float]:
    return [1.0 if row == 5 else 0.0 for row in range(len(prompts))]


class WinnerTakesAll(GRPOTrainer):
    """Stock TRL with the one advantage written out: row 5 is its group's winner, 1 above the best of the others (0)."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output["advantages"] = torch.tensor([1.0 if row == 5 else 0.0 for row in range(12)])
        return output


def winner_only(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """A rule under which the other rows of the winner's group have advantage 0: r_i − (best of the rest), not below
    0."""
    groups = rewards.view(-1, group_size)
    first = groups.topk(2, dim=1).values
    rest = torch.where(groups == first[:, :1], first[:, 1:], first[:, :1])
    return (groups - rest).clamp(min=0.0).flatten()


@pytest.mark.not_fast
def test_one_live_row(tiny_folder: Path, tmp_path: Path) -> None:
    objective = {"name": "dr_grpo", "advantage": winner_only}
    found = ours(tiny_folder, tmp_path, objective=objective, reward=one_winner)
    config = GRPOConfig(**arguments(tmp_path), **STOCK["dr_grpo"])
    check_equal(found, train(WinnerTakesAll, config, tiny_folder, rollout=rollout(tiny_folder), reward=one_winner))
    assert live_shares(found) == pytest.approx([1 / 12] * 4)


def lora() -> Any:
    targets = ["q_proj", "v_proj"]
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights="gaussian")


@pytest.mark.not_fast
def test_lora(tiny_folder: Path, tmp_path: Path) -> None:
    configs = {
        LabTrainer: LabConfig(**arguments(tmp_path), objective="dr_grpo"),
        GRPOTrainer: GRPOConfig(**arguments(tmp_path), **STOCK["dr_grpo"]),
    }
    runs = []
    for kind, config in configs.items():
        torch.manual_seed(0)
        runs.append(train(kind, config, tiny_folder, rollout=rollout(tiny_folder), peft_config=lora()))
    found, expected = runs
    assert found.losses == pytest.approx(expected.losses, rel=LOSS, abs=0.1 * LOSS)
    assert set(found.weights) == set(expected.weights)
    for name, value in expected.weights.items():
        assert torch.allclose(found.weights[name], value, rtol=1e-5, atol=1e-7), name


def live_shares(run: Run) -> list[float]:
    return [row["update/live_share"] for row in run.history if "update/live_share" in row]


@pytest.mark.not_fast
@pytest.mark.parametrize("budget", [24, 60, 10_000])
def test_any_token_budget(budget: int, tiny_folder: Path, tmp_path: Path) -> None:
    check_equal(ours(tiny_folder, tmp_path, update={"max_tokens": budget}), stock(tiny_folder))


@pytest.mark.not_fast
def test_kept_dead_groups_give_the_same_weights(tiny_folder: Path, tmp_path: Path) -> None:
    skip = ours(tiny_folder, tmp_path)
    keep = ours(tiny_folder, tmp_path, update={"dead_groups": "keep"})
    check_equal(keep, stock(tiny_folder))
    assert max(live_shares(skip)) < 1.0
    assert live_shares(keep) == [1.0] * 4


@pytest.mark.not_fast
@pytest.mark.parametrize("preset", ["dr_grpo", "dapo"])
@pytest.mark.parametrize("dead_every", [3, 0])
def test_denominators_counted_after_skipping_would_be_seen(
    preset: str, dead_every: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the test: the classic mistake, rows and tokens counted from what the plan kept, must fail the
    comparison; and it must pass where the plan keeps every row, since only the counting is wrong."""
    original, plans = exact_update.ExactUpdate._bin_loss, []
    make_plan = exact_update.ExactUpdate._plan

    def planned(self: Any, numbers: Any, budget: int, found: Any) -> Any:
        plan = make_plan(self, numbers, budget, found)
        rows = [row for rank in plan.bins for rows in rank for row in rows]
        plans.append((float(len(rows)), numbers.scored[rows].sum()))
        return plan

    def after_skipping(self: Any, model: Any, rows: Any, denominators: Any) -> Any:
        return original(self, model, rows, replace(denominators, rows=plans[-1][0], tokens=plans[-1][1]))

    reward = distinct if dead_every == 0 else None
    expected = stock(tiny_folder, preset, reward=reward)
    monkeypatch.setattr(exact_update.ExactUpdate, "_plan", planned)
    monkeypatch.setattr(exact_update.ExactUpdate, "_bin_loss", after_skipping)
    wrong = ours(tiny_folder, tmp_path, preset, reward=reward)
    if dead_every == 0:
        assert {rows for rows, _ in plans} == {12.0}
        check_equal(wrong, expected)
    else:
        with pytest.raises(AssertionError):
            check_equal(wrong, expected)


def distinct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """No two rows alike, so that none sits on its group's mean: every row is live."""
    return [(sum(ids) % 97) / 97 + row * 1e-3 for row, ids in enumerate(completion_ids)]


@pytest.mark.not_fast
def test_bnpo_is_left_unbinned_and_says_why(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="grpo_lab")
    found = ours(tiny_folder, tmp_path, "bnpo")
    check_equal(found, stock(tiny_folder, "bnpo"))
    steps = [row for row in found.history if "loss" in row]
    assert [row["update/computed_share"] for row in steps] == [1.0] * 4
    assert live_shares(found) == [1.0] * 4
    assert "divides by the tokens of its own micro-batch" in caplog.text


@pytest.mark.not_fast
def test_a_surrogate_that_acts_without_advantage_keeps_all_rows(tiny_folder: Path, tmp_path: Path) -> None:
    """Conditions are checked, not assumed: a team's surrogate with a pull of its own must not lose dead rows."""

    def pull(batch: Any) -> torch.Tensor:
        return -batch.advantages * batch.ratio + 0.1 * batch.logps.square()

    objective = {"name": "dr_grpo", "surrogate": pull}
    found = ours(tiny_folder, tmp_path, objective=objective)
    assert set(live_shares(found)) == {1.0}
    check_equal(found, ours(tiny_folder, tmp_path, objective=objective, update="off"))


@pytest.mark.not_fast
@pytest.mark.parametrize("preset", BINNED)
def test_in_float64_only_the_loss_head_rounds(preset: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Model, gradients and steps in float64; TRL's head makes float32 log-probs (2e-7). The planning in pure float64,
    where nothing rounds, is in ``tests/unit/update/test_update_plan_exact.py``."""
    own = LabConfig(**arguments(tmp_path, **by_name(preset)))
    theirs = GRPOConfig(**arguments(tmp_path), **STOCK[preset])
    found = train(LabTrainer, own, tiny_folder, dtype=torch.float64)
    expected = train(GRPOTrainer, theirs, tiny_folder, dtype=torch.float64)
    assert movement_difference(found, expected) < FLOAT64


@pytest.mark.not_fast
@pytest.mark.parametrize("preset", BINNED)
def test_the_order_of_rows_does_not_matter(
    preset: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL shuffles rows after generation, which decides the micro-batch they are in: once as they come, once
    reversed."""
    found = []
    for order in (lambda batch: batch, reversed_rows):
        monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", order)
        found.append(ours(tiny_folder, tmp_path, preset))
    assert movement_difference(*found) <= movement_bound(found[0])


def reversed_rows(batch: dict[str, Any]) -> dict[str, Any]:
    rows = batch["prompt_ids"].size(0)
    turned: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == rows:
            turned[name] = value.flip(0)
        elif isinstance(value, list) and len(value) == rows:
            turned[name] = value[::-1]
        else:
            turned[name] = value
    return turned
