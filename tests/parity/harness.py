"""Stock TRL and ours on the same rollouts: per-step losses and final weights side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer.resume.state import read_state, write_state
from tolerance import movement_gap

LENGTHS = (3, 5, 9, 14, 21, 30)
#: preset → the TRL settings that say the same
STOCK: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 3.0},
}


@dataclass
class Run:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]
    history: list[dict[str, Any]]
    trainer: Any


class Kept(ScriptedRollout):
    """Keeps ``batches``: the prompts and the completions of each generation."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = super().__call__(prompts, trainer)
        self.__dict__.setdefault("batches", []).append((found["prompt_ids"], found["completion_ids"]))
        return found


def with_entry(checkpoint: Path, name: str, entry: Any = None) -> None:
    """Another entry in a checkpoint's record; None takes it out."""
    entries = {**read_state(checkpoint).entries, name: entry}
    write_state(checkpoint, {name: value for name, value in entries.items() if value is not None})


def problems(n: int = 12) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{'Add ' * (i % 4)}{i} and {i + 1}." for i in range(n)], "number": list(range(n))}
    )


def mixed_reward(dead_every: int = 3) -> Callable[..., list[float]]:
    """Some groups all equal (dead), the others spread over five values by their token ids."""

    def parity_reward(prompts: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        return [
            0.5 if dead_every and n % dead_every == 0 else (sum(ids) % 5) / 4.0
            for n, ids in zip(number, completion_ids, strict=True)
        ]

    return parity_reward


def by_name(preset: str) -> dict[str, Any]:
    """Our settings that say the same: ``objective``, and beside it what a preset leaves to the user."""
    return {"objective": preset} | ({"epsilon_high": 3.0} if preset == "cispo" else {})


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_generations": 4,
        "max_completion_length": 32,
        "max_steps": 4,
        "learning_rate": 0.5,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "disable_tqdm": True,
        "epsilon": 0.2,
    }
    settings.update(changes)
    return settings


def train(
    trainer_class: Any,
    args: Any,
    model_folder: Path,
    *,
    rollout: ScriptedRollout | None = None,
    reward: Any = None,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> Run:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    rollout = rollout or ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2)
    trainer = trainer_class(
        model=model,
        reward_funcs=mixed_reward() if reward is None else reward,
        args=args,
        train_dataset=options.pop("train_dataset", None) or problems(),
        processing_class=tokenizer,
        rollout_func=rollout,
        **options,
    )
    for name, value in trainer.model.state_dict().items():  # a critic was added, an adapter wrapped
        start.setdefault(name, value.detach().clone())
    if prepare is not None:
        prepare(trainer)
    trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    weights = {key: value.detach().cpu().clone() for key, value in state.items()}
    return Run(
        [row["loss"] for row in steps],
        [row["grad_norm"] for row in steps],
        weights,
        start,
        trainer.state.log_history,
        trainer,
    )


def movement_difference(ours: Run, stock: Run) -> float:
    """‖(w_ours − w_0) − (w_stock − w_0)‖ / ‖w_stock − w_0‖ over all weights: relative to what training did."""
    difference = moved = 0.0
    for name, value in stock.weights.items():
        if not value.is_floating_point():
            continue
        difference += (ours.weights[name].double() - value.double()).square().sum().item()
        moved += (value.double() - stock.start[name].double()).square().sum().item()
    return (difference / max(moved, 1e-300)) ** 0.5


def movement_bound(stock: Run, width: int = 32) -> float:
    """What rounding alone may make of ``movement_difference`` in float32, from the run's own sizes and number of steps,
    and the model's width. A tensor that did not move (frozen under an adapter) is not rounded either."""
    weights = moved = 0.0
    for name, value in stock.weights.items():
        change = (value.double() - stock.start[name].double()).square().sum().item()
        weights += value.double().square().sum().item() if change else 0.0
        moved += change
    steps = max(
        [1, *(int(row.get("step", 1)) for row in stock.history)]
    )  # not the rows: one may stand for several steps
    return movement_gap(torch.float32, weights**0.5, max(moved, 1e-300) ** 0.5, steps, width=width)


#: one row in a hundred, left out or counted twice: a bound above it would not see that
ONE_ROW_IN_A_HUNDRED = 1e-2


def assert_same_movement(ours: Run, stock: Run) -> None:
    """Equal but for rounding, and rounding is small enough here that a wrong row, factor or denominator would be
    seen."""
    assert movement_bound(stock) < ONE_ROW_IN_A_HUNDRED, "hardly trained: rounding hides what was to be compared"
    assert movement_difference(ours, stock) <= movement_bound(stock)


def adamw_bound(stock: Run) -> float:
    """The same under AdamW, whose step is g / (√v + 1e-8) and so of one size for every weight: a gradient that is off
    by δ moves its weight by up to δ / |g| of a step, which is more than the relative error of the whole where |g| is
    small. Gradients spread over some decades; the ones of a tenth of the typical size or less are a tenth of the
    weights, so the norm grows by about √10."""
    return 10**0.5 * movement_bound(stock)


def weight_difference(ours: Run, stock: Run) -> float:
    """‖w_ours − w_stock‖ / ‖w_stock‖ over all weights."""
    difference = size = 0.0
    for name, value in stock.weights.items():
        difference += (ours.weights[name].double() - value.double()).square().sum().item()
        size += value.double().square().sum().item()
    return (difference / size) ** 0.5
