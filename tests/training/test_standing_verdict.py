"""The exact update's verdict has one owner: asked once per generation batch, anew where its answer may have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.batch import TokenBatch
from grpo_lab.trainer.step import verdict
from parity.harness import arguments, train

TWO_STEPS = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4, "learning_rate": 0.1}


def plain(batch: TokenBatch) -> Tensor:
    return -batch.ratio * batch.advantages


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"objective": "dr_grpo"}, [0, 2]),
        ({"objective": "grpo", "beta": 0.04, "num_iterations": 2}, [0]),
        ({"objective": {"name": "dr_grpo", "surrogate": plain}}, [0, 1, 2, 3]),  # a team's part may follow a schedule
    ],
)
def test_asked_once_per_generation_batch(
    settings: dict[str, Any], expected: list[int], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, steps = verdict.answers, []

    def counted(trainer: Any, objective: Any) -> Any:
        steps.append(trainer.state.global_step)
        return original(trainer, objective)

    monkeypatch.setattr(verdict, "answers", counted)
    run = train(LabTrainer, LabConfig(**arguments(tmp_path, **TWO_STEPS, **settings)), tiny_folder)
    assert steps == expected
    standing = run.trainer.exact_update.verdict
    assert standing.so_far() is standing.so_far(), "a reader asks nobody"
    standing.forget()
    assert standing.now().stock is None
    assert len(steps) == len(expected) + 1, "forgotten (a resume), it is asked anew"
