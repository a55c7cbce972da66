"""Trainings with planted NaN: accelerate launch … guard_worker.py MODEL OUT. Leaves ``<rank>.json``.

``Plant`` makes one kind of number bad in one optimizer step, on one rank only: the loss of a micro-batch (its gradient
stays finite), the gradient after the backward (and after DDP has shared it), a reward, a log-prob of the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer, PPOTrainer
from grpo_lab.trainer.step.guard import NumbersError
from parity.harness import arguments, problems

#: optimizer step (from 1 on) → what is bad in it
EACH = {2: "loss", 4: "gradient", 6: "reward", 8: "log_prob"}
STEPS = 9


class Plant(TrainerCallback):
    """What is bad, and the state of the training before and after every step.

    Args:
        bad: optimizer step → kind.
        rank: the only rank on which it is.
    """

    def __init__(self, bad: dict[int, str], rank: int = 0) -> None:
        self.bad, self.rank = dict(bad), rank
        self.trainer: Any = None
        self.before: Tensor | None = None
        self.moved: list[bool] = []
        self.schedule: list[int] = []

    def on(self, kind: str) -> bool:
        here = self.trainer.accelerator.process_index == self.rank
        return here and self.bad.get(self.trainer.state.global_step + 1) == kind

    def into(self, trainer: Any) -> None:
        self.trainer = trainer
        loss_of, step = trainer.parts.update.loss, trainer.training_step

        def loss(*args: Any) -> Tensor:
            found = loss_of(*args)
            return found + torch.tensor(math.nan) if self.on("loss") else found

        def training_step(model: Any, *args: Any, **kwargs: Any) -> Tensor:
            found = step(model, *args, **kwargs)
            if self.on("gradient") and trainer.accelerator.sync_gradients:
                next(local(p.grad) for p in model.parameters() if p.grad is not None).view(-1)[0] = math.inf
            return found

        trainer.parts.update.loss, trainer.training_step = loss, training_step
        trainer.add_callback(self)

    # -- the parts of the run that may be bad --------------------------------------------------------------------------

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        values = [(sum(ids) % 7) / 7 for ids in completion_ids]
        return [*values[:-1], -math.inf] if self.on("reward") else values

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Completions that depend on the prompt and the row only, so that two trainings see the same ones."""
        ids = [[20 + (sum(map(ord, text)) * 7 + row * 13) % 60, 30 + row % 5, 40] for row, text in enumerate(prompts)]
        logprobs = [[-1.0] * len(row) for row in ids]
        if self.on("log_prob"):
            logprobs[-1][1] = math.inf
        return {"prompt_ids": trainer._tokenize_prompts(prompts)[0], "completion_ids": ids, "logprobs": logprobs}

    # -- what a step did -----------------------------------------------------------------------------------------------

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.before = state_of(self.trainer)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.moved.append(not torch.equal(self.before, state_of(self.trainer)))
        self.schedule.append(self.trainer.lr_scheduler.last_epoch)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(trainer: Any) -> Tensor:
    """This rank's weights, moments and AdamW's counts, in one row."""
    weights = [local(p.detach()).flatten().float() for p in trainer.model.parameters()]
    own = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    entries = [entry for parameter in own for entry in trainer.optimizer.state.get(parameter, {}).values()]
    return torch.cat([*weights, *(local(e.detach()).flatten().float() for e in entries if isinstance(e, Tensor))])


def build(
    model: str | Path, folder: Path, plant: Plant, kind: Any = LabTrainer, reward: Any = None, **changes: Any
) -> Any:
    settings = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS, "optim": "adamw_torch",
        "learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "objective": "dr_grpo", **changes,
    }  # fmt: skip
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward or named(plant.reward),
        args=LabConfig(**arguments(folder, **settings)),
        train_dataset=problems(16),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=plant.rollout,
    )
    plant.into(trainer)
    return trainer


def named(reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
    def planted(**inputs: Any) -> list[float]:
        return reward(**inputs)

    return planted


def shares(trainer: Any, name: str) -> list[float | None]:
    """``guard/<name>`` of every logged step, None where it was not logged."""
    return [row.get(f"guard/{name}") for row in trainer.state.log_history if "loss" in row]


def resumed_in_a_warm_up(model: str, folder: Path) -> list[bool]:
    """From checkpoints in which no weight has moments (the first step was left out), and in which the critic's alone
    have: like the whole run?"""

    def run(name: str, bad: dict[int, str], checkpoint: str | None = None) -> Tensor:
        settings = {"objective": None, "value": {"warmup_steps": 2}, "lr_scheduler_type": "constant"}
        trainer = build(
            model, folder / name, Plant(bad), PPOTrainer, max_steps=4, save_strategy="steps", save_steps=1, **settings
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return state_of(trainer)

    whole = run("warm", {1: "loss"})
    again = [run(f"from-{step}", {}, str(folder / "warm" / f"checkpoint-{step}")) for step in (1, 2, 3)]
    return [torch.equal(whole, one) for one in again]


def main(model: str, out: str) -> None:
    folder, plant = Path(out), Plant(EACH, rank=1)
    trainer = build(model, folder / "each", plant)
    trainer.train()
    report: dict[str, Any] = {
        "moved": plant.moved,
        "schedule": plant.schedule,
        "finite": bool(state_of(trainer).isfinite().all()),
        "guard": {name: shares(trainer, name) for name in ("left_out", "loss", "gradient", "reward", "log_prob")},
    }
    row = Plant(dict.fromkeys((3, 4, 5), "loss"), rank=1)
    stopped = build(model, folder / "stopped", row, save_strategy="steps", save_steps=1)
    try:
        stopped.train()
    except NumbersError as error:
        report["stopped"] = str(error)
    report["stopped after"] = row.moved
    report["resumed"] = resumed_in_a_warm_up(model, folder)
    (folder / f"{trainer.accelerator.process_index}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
