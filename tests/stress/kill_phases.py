"""A trainer that says where it is: for ``kill_anywhere.py``, which kills it there.

``Lab`` and ``Stock`` are ``grpo_lab.LabTrainer`` and ``trl.GRPOTrainer``, which write the name of their phase into a
file as they enter it and leave it. Nothing else differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from grpo_lab import LabTrainer

#: in this order a step goes through them; ``between`` is everything else (data, logs, the way from one to the next)
PHASES = ("generating", "scoring", "updating", "saving")
VARIABLE = "KILL_ANYWHERE_PHASE_FILE"


class PhaseFile:
    """``<phase> <step>``, written in one call by the first rank; read by who kills."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, phase: str, step: int) -> None:
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(f"{phase} {step}".ljust(40).encode())

    def read(self) -> tuple[str, int]:
        words = self.path.read_text().split() if self.path.exists() else []
        return (words[0], int(words[1])) if len(words) == 2 else ("starting", 0)


@contextmanager
def during(phase: str, trainer: Any) -> Iterator[None]:
    path = os.environ.get(VARIABLE)
    if path is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    file, step = PhaseFile(Path(path)), trainer.state.global_step + 1
    before = file.read()[0]
    file.write(phase, step)
    yield
    file.write(before, step)


def told(base: type) -> type:
    """``base`` with its phases written down."""

    class Told(base):  # type: ignore[misc]
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with during("generating", self):
                return super()._generate(*args, **kwargs)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            with during("scoring", self):
                return super()._calculate_rewards(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with during("updating", self):
                return super().training_step(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            with during("saving", self):
                return super()._save_checkpoint(*args, **kwargs)

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            with during("between", self):
                return super()._inner_training_loop(*args, **kwargs)

    Told.__name__ = Told.__qualname__ = f"Told{base.__name__}"
    return Told


Lab = told(LabTrainer)
Stock = told(GRPOTrainer)


def digits(completions: list[Any], **_: Any) -> list[float]:
    """Varied, cheap and without memory: the share of digits, and of every third letter."""
    return [
        (sum(c.isdigit() for c in str(text)) + sum(c in "cfilorux" for c in str(text)) / 3) / 10 for text in completions
    ]


def stock(recipe: dict[str, Any], folder: Path, ours: tuple[str, ...]) -> int:
    """TRL's own trainer with the recipe's settings, but for ``ours``, from its last checkpoint where there is one."""
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig

    from grpo_lab.recipe.data import load_rows
    from grpo_lab.recipe.models import load_model
    from grpo_lab.recipe.sections import recipe_from

    read = recipe_from({**recipe, "output_dir": str(folder)})
    model, tokenizer = load_model(read.model, recipe["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("RANK", "0") == "0" and not (folder / "cold_start").is_dir():
        model.save_pretrained(folder / "cold_start")
    settings = {name: value for name, value in recipe.items() if name not in ours}
    trainer = Stock(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=str(folder), report_to="none", loss_type="dr_grpo", scale_rewards="none", **settings
        ),
        train_dataset=load_rows(read.data),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    trainer.save_model(str(folder))
    if trainer.accelerator.is_main_process:
        lines = [json.dumps(row) for row in trainer.state.log_history if "loss" in row]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    return 0
