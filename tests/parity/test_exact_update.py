"""The exact update gives stock's weights whatever the shape of the step: losses and movement (weights minus start)
within what float32 allows for sums in another order (``tolerance.py``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer.step import exact_update
from parity.harness import (
    LENGTHS,
    Run,
    adamw_bound,
    arguments,
    movement_bound,
    movement_difference,
    train,
    weight_difference,
)
from tolerance import loss_gap, two_walks

#: TRL's head rounds log-probs to float32 in a float64 model: once, and not in a sum
FLOAT64 = 6.0 * two_walks(torch.float32, 4)
#: terms of size 1 (|Â| ≤ 1, ratios near it), at most 12 rows of 30 tokens in four steps
LOSS = loss_gap(torch.float32, terms=1.0, additions=12 * 30, steps=4)
STOCK = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 3.0},
}


def rollout(tiny: Path, lengths: tuple[int, ...] = LENGTHS, truncated: float = 0.2) -> ScriptedRollout:
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(tiny).eos_token_id
    return ScriptedRollout(range(20, 90), lengths, end_id=end, truncated_share=truncated)


def both(
    tiny: Path, out: Path, preset: str = "dr_grpo", lengths: tuple[int, ...] = LENGTHS, **changes: Any
) -> tuple[Run, Run]:
    """Ours (objective by name, exact update) and stock, with the same settings."""
    options = {key: changes.pop(key) for key in ("reward", "peft", "truncated") if key in changes}
    ours = {"epsilon_high": 3.0} if preset == "cispo" else {}
    runs = []
    for kind, config in (
        (LabTrainer, LabConfig(**arguments(out, **changes), objective=preset, **ours)),
        (GRPOTrainer, GRPOConfig(**arguments(out, **changes), **STOCK[preset])),
    ):
        extra = {"peft_config": options["peft"]()} if "peft" in options else {}
        made = rollout(tiny, lengths, options.get("truncated", 0.2))
        runs.append(train(kind, config, tiny, rollout=made, reward=options.get("reward"), **extra))
    return runs[0], runs[1]


def check_equal(ours: Run, stock: Run) -> None:
    assert ours.losses == pytest.approx(stock.losses, rel=LOSS, abs=0.1 * LOSS)
    assert movement_difference(ours, stock) <= movement_bound(stock)


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


@pytest.mark.not_fast
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape_of_the_step(shape: str, tiny_folder: Path, tmp_path: Path) -> None:
    check_equal(*both(tiny_folder, tmp_path, **SHAPES[shape]))


@pytest.mark.thorough(but="*-gspo")
@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in STOCK if name != "dr_grpo"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape_of_the_step_for_each_method(shape: str, preset: str, tiny_folder: Path, tmp_path: Path) -> None:
    check_equal(*both(tiny_folder, tmp_path, preset, **SHAPES[shape]))


@pytest.mark.not_fast
def test_completions_of_one_token(tiny_folder: Path, tmp_path: Path) -> None:
    check_equal(*both(tiny_folder, tmp_path, lengths=(1,), truncated=1.0))


@pytest.mark.not_fast
def test_all_truncated_and_masked_is_a_step_on_zero_gradients(tiny_folder: Path, tmp_path: Path) -> None:
    ours, stock = both(tiny_folder, tmp_path, truncated=1.0, mask_truncated_completions=True)
    assert weight_difference(ours, stock) == 0.0
    assert movement_difference(ours, stock) == 0.0
    assert ours.losses == stock.losses == [0.0] * 4


def dead_after_first(number: list[int], completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    return [1.0 if trainer_state.global_step else float(sum(ids) % 3) for ids in completion_ids]


@pytest.mark.not_fast
def test_no_live_row_still_steps_as_stock(tiny_folder: Path, tmp_path: Path) -> None:
    """Momentum and weight decay go on moving the weights on zero gradients; skipping the optimizer would not."""
    changes = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1}
    ours, stock = both(tiny_folder, tmp_path, reward=dead_after_first, **changes)
    assert ours.grad_norms[1:] == [0.0] * 3
    assert movement_difference(ours, stock) <= adamw_bound(stock)
    only_first = both(tiny_folder, tmp_path, reward=dead_after_first, max_steps=1, **changes)[0]
    assert weight_difference(ours, only_first) > 1e-3


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
    config = LabConfig(**arguments(tmp_path), objective={"name": "dr_grpo", "advantage": winner_only})
    ours = train(LabTrainer, config, tiny_folder, rollout=rollout(tiny_folder), reward=one_winner)
    stock = GRPOConfig(**arguments(tmp_path), **STOCK["dr_grpo"])
    check_equal(ours, train(WinnerTakesAll, stock, tiny_folder, rollout=rollout(tiny_folder), reward=one_winner))
    assert [row["update/live_share"] for row in ours.history if "update/live_share" in row] == pytest.approx(
        [1 / 12] * 4
    )


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian"
    )


@pytest.mark.not_fast
def test_lora(tiny_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = train(
        LabTrainer,
        LabConfig(**arguments(tmp_path), objective="dr_grpo"),
        tiny_folder,
        rollout=rollout(tiny_folder),
        peft_config=lora(),
    )
    torch.manual_seed(0)
    stock = train(
        GRPOTrainer,
        GRPOConfig(**arguments(tmp_path), **STOCK["dr_grpo"]),
        tiny_folder,
        rollout=rollout(tiny_folder),
        peft_config=lora(),
    )
    assert ours.losses == pytest.approx(stock.losses, rel=LOSS, abs=0.1 * LOSS)
    assert set(ours.weights) == set(stock.weights)
    for name, value in stock.weights.items():
        assert torch.allclose(ours.weights[name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.not_fast
@pytest.mark.parametrize("budget", [24, 60, 10_000])
def test_any_token_budget(budget: int, tiny_folder: Path, tmp_path: Path) -> None:
    stock = both(tiny_folder, tmp_path)[1]
    config = LabConfig(**arguments(tmp_path), objective="dr_grpo", update={"max_tokens": budget})
    check_equal(train(LabTrainer, config, tiny_folder, rollout=rollout(tiny_folder)), stock)


@pytest.mark.not_fast
def test_kept_dead_groups_give_the_same_weights(tiny_folder: Path, tmp_path: Path) -> None:
    skip, stock = both(tiny_folder, tmp_path)
    config = LabConfig(**arguments(tmp_path), objective="dr_grpo", update={"dead_groups": "keep"})
    keep = train(LabTrainer, config, tiny_folder, rollout=rollout(tiny_folder))
    check_equal(keep, stock)
    shares = [[row["update/live_share"] for row in run.history if "update/live_share" in row] for run in (skip, keep)]
    assert max(shares[0]) < 1.0
    assert shares[1] == [1.0] * 4


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

    changes = {"reward": distinct if dead_every == 0 else None}
    stock = both(tiny_folder, tmp_path, preset, **changes)[1]
    monkeypatch.setattr(exact_update.ExactUpdate, "_plan", planned)
    monkeypatch.setattr(exact_update.ExactUpdate, "_bin_loss", after_skipping)
    wrong = both(tiny_folder, tmp_path, preset, **changes)[0]
    if dead_every == 0:
        assert {rows for rows, _ in plans} == {12.0}
        check_equal(wrong, stock)
    else:
        with pytest.raises(AssertionError):
            check_equal(wrong, stock)


def distinct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """No two rows alike, so that none sits on its group's mean: every row is live."""
    return [(sum(ids) % 97) / 97 + row * 1e-3 for row, ids in enumerate(completion_ids)]


@pytest.mark.not_fast
def test_bnpo_is_left_unbinned_and_says_why(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="grpo_lab")
    ours = train(
        LabTrainer, LabConfig(**arguments(tmp_path), objective="bnpo"), tiny_folder, rollout=rollout(tiny_folder)
    )
    stock = train(
        GRPOTrainer, GRPOConfig(**arguments(tmp_path), loss_type="bnpo"), tiny_folder, rollout=rollout(tiny_folder)
    )
    check_equal(ours, stock)
    steps = [row for row in ours.history if "loss" in row]
    assert [row["update/computed_share"] for row in steps] == [1.0] * 4
    assert [row["update/live_share"] for row in steps] == [1.0] * 4
    assert "divides by the tokens of its own micro-batch" in caplog.text


@pytest.mark.not_fast
def test_a_surrogate_that_acts_without_advantage_keeps_all_rows(tiny_folder: Path, tmp_path: Path) -> None:
    """Conditions are checked, not assumed: a team's surrogate with a pull of its own must not lose dead rows."""

    def pull(batch: Any) -> torch.Tensor:
        return -batch.advantages * batch.ratio + 0.1 * batch.logps.square()

    config = LabConfig(**arguments(tmp_path), objective={"name": "dr_grpo", "surrogate": pull})
    ours = train(LabTrainer, config, tiny_folder, rollout=rollout(tiny_folder))
    assert {row["update/live_share"] for row in ours.history if "update/live_share" in row} == {1.0}
    off = LabConfig(**arguments(tmp_path), objective={"name": "dr_grpo", "surrogate": pull}, update="off")
    check_equal(ours, train(LabTrainer, off, tiny_folder, rollout=rollout(tiny_folder)))


@pytest.mark.not_fast
@pytest.mark.parametrize("preset", STOCK)
def test_in_float64_only_the_loss_head_rounds(preset: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Model, gradients and steps in float64; TRL's head makes float32 log-probs (2e-7). The planning in pure float64,
    where nothing rounds, is in ``tests/unit/update/test_update_plan_exact.py``."""
    ours, stock = (
        train(kind, config, tiny_folder, dtype=torch.float64)
        for kind, config in (
            (LabTrainer, LabConfig(**arguments(tmp_path), objective=preset,
                                   **({"epsilon_high": 3.0} if preset == "cispo" else {}))),
            (GRPOTrainer, GRPOConfig(**arguments(tmp_path), **STOCK[preset])),
        )
    )  # fmt: skip
    assert movement_difference(ours, stock) < FLOAT64


@pytest.mark.not_fast
@pytest.mark.parametrize("preset", STOCK)
def test_the_order_of_rows_does_not_matter(
    preset: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL shuffles rows after generation, which decides the micro-batch they are in: once as they come, once
    reversed."""
    found = []
    for order in (lambda batch: batch, reversed_rows):
        monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", order)
        found.append(both(tiny_folder, tmp_path, preset)[0])
    assert movement_difference(*found) <= movement_bound(found[0])


def reversed_rows(batch: dict[str, Any]) -> dict[str, Any]:
    rows = batch["prompt_ids"].size(0)
    turned: dict[str, Any] = {}
    for name, value in batch.items():
        per_row = isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == rows
        turned[name] = (
            value.flip(0) if per_row else value[::-1] if isinstance(value, list) and len(value) == rows else value
        )
    return turned
