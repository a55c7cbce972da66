"""Section about the quick start on this device: its cold start and its reinforcement learning, shortened, with the
seconds of a step of each, and what the whole quick start would take by them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import Trainer

from gpu_checks.section import Row, Setting, verdict
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import read_recipe

QUICK = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "dr_grpo.yaml"
#: optimizer steps in the recipe: of its cold start, and of its reinforcement learning
WHOLE = (1000, 100)


def section(setting: Setting) -> Iterator[Row]:
    cold, steps = (8, 2) if setting.tiny else (100, 10)
    changes: dict[str, Any] = {
        "output_dir": str(setting.own / "run"), "use_cpu": not setting.gpu, "disable_tqdm": True,
        "cold_start.max_steps": cold, "max_steps": steps, "evaluation.data.n": 16 if setting.tiny else 100,
    }  # fmt: skip
    if setting.tiny:
        changes |= {"cold_start.data.n": 800, "data.n": 200}
    timed: list[tuple[str, float]] = []
    began = time.perf_counter()
    with mock.patch.object(Trainer, "train", watched(Trainer.train, timed)):
        train(read_recipe(QUICK, changes), overwrite=True)
    ran = time.perf_counter() - began
    spent = [seconds for _, seconds in timed]
    yield verdict("seconds of a quick start of so many steps", ran, f"{cold} and {steps} steps")
    for name, seconds, number in zip(("cold start", "reinforcement"), spent, (cold, steps), strict=True):
        yield verdict(f"seconds a step of its {name}", seconds / number, device=setting.device)
    whole = sum(seconds / number * of for seconds, number, of in zip(spent, (cold, steps), WHOLE, strict=True))
    whole += ran - sum(spent)
    yield verdict(f"seconds of the whole quick start ({WHOLE[0]} and {WHOLE[1]} steps), reckoned from these", whole)


def watched(inner: Any, timed: list[tuple[str, float]]) -> Any:
    """Return the method ``inner`` of a trainer, which also appends the trainer's class and the seconds to ``timed``."""

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = inner(self, *args, **kwargs)
        timed.append((type(self).__name__, time.perf_counter() - began))
        return out

    return trained
