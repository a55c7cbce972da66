"""Section about the update's bins on a GPU: does the host wait for the device between them, and how many tokens does
`max_tokens: auto` put into a forward? A CPU has nothing to wait for and no statistics of memory; there the section only
shows that it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset

from gpu_checks.parity import models
from gpu_checks.resume import third
from gpu_checks.section import Row, Setting, below, verdict
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.step import exact_update
from grpo_lab.trainer.trl_bridge import replaced

STEPS = 5


def section(setting: Setting) -> Iterator[Row]:
    for share in ("off", "on"):
        waits: list[str] = []
        trainer, bins = trained(setting, share, 512, waits)
        what = "each prompt once" if share == "on" else "each row with its prompt"
        told = "; ".join(dict.fromkeys(waits))[:300]
        passed = not waits if setting.gpu else None  # a CPU has nothing to wait for
        yield verdict(f"waits for the device between bins, {what}", len(waits), "0", passed, bins=bins, where=told)
    trainer, bins = trained(setting, "off", "auto", [])
    number = trainer.exact_update.budget.tokens
    yield verdict("tokens of a forward by free memory", "as stock's" if number is None else number, "> 0 on a GPU",
                  number is not None if setting.gpu else None, bins=bins)  # fmt: skip
    yield below("forwards of the last step by `max_tokens: auto`", bins, 3)


def trained(setting: Setting, share: str, tokens: int | str, waits: list[str]) -> tuple[Any, int]:
    """Train a few steps; return the trainer and the number of bins in its last step. From the third step on (the first
    two examine the model) the place in the code of every wait for the device is added to ``waits``."""
    trainer = LabTrainer(
        model=str(models(setting)),
        reward_funcs=third,
        args=LabConfig(**arguments(setting, share, tokens)),
        train_dataset=Dataset.from_dict({"prompt": [f"Tom has {n} apples. How many?" for n in range(64)]}),
    )
    bins = [0]
    backwards = exact_update.ExactUpdate._backwards

    def looked_at(self: Any, model: Any, rows: Any, *more: Any) -> Any:
        bins[0] = len(rows.bins)
        if trainer.state.global_step < 2 or not setting.gpu:
            return backwards(self, model, rows, *more)
        with watched(waits):
            return backwards(self, model, rows, *more)

    with replaced(exact_update.ExactUpdate, "_backwards", looked_at):
        trainer.train()
    return trainer, bins[0]


@contextmanager
def watched(waits: list[str]) -> Iterator[None]:
    """Add to ``waits`` the place in the code of every operation inside the block that waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits += [f"{one.filename}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)]


def arguments(setting: Setting, share: str, tokens: int | str) -> dict[str, Any]:
    return {
        "output_dir": str(setting.own / f"{share} {tokens}"), "objective": "dr_grpo", "num_generations": 8,
        "per_device_train_batch_size": 32, "max_completion_length": 8 if setting.tiny else 64, "max_steps": STEPS,
        "learning_rate": 1e-4, "save_strategy": "no", "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
        "bf16": setting.gpu, "use_cpu": not setting.gpu, "seed": 1,
        "update": {"max_tokens": tokens, "share_prompts": share},
    }  # fmt: skip
