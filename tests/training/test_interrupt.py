"""Ctrl-C during ``train``: the step ends, its checkpoint is written, and a resumed run equals the uninterrupted one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model


@pytest.fixture(autouse=True)
def _as_from_a_terminal() -> Iterator[None]:
    """A shell lets what it starts in the background ignore Ctrl-C, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def trainer_in(folder: Path, interrupt_at: int | None = None, times: int = 1, **changes: Any) -> LabTrainer:
    """Four steps; the reward of step ``interrupt_at`` presses Ctrl-C."""
    model, tokenizer = tiny_model("qwen2", hidden_size=32)
    calls = [0]

    def odd_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls[0] += 1
        if calls[0] == interrupt_at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]

    settings: dict[str, Any] = {
        "output_dir": str(folder), "objective": "dr_grpo", "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 8, "max_steps": 4, "learning_rate": 5e-3, "save_strategy": "steps", "save_steps": 500,
        "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"Tom has {n} apples. How many?" for n in range(8)]})
    args = LabConfig(**{**settings, **changes})
    return LabTrainer(model=model, reward_funcs=odd_share, args=args, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.not_fast
def test_ctrl_c_ends_the_step_keeps_it_and_goes_on_exactly(tmp_path: Path) -> None:
    whole = trainer_in(tmp_path / "whole")
    whole.train()
    handler = signal.getsignal(signal.SIGINT)
    stopped = trainer_in(tmp_path / "stopped", interrupt_at=2)
    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted after step 2; a checkpoint was written to .*checkpoint-2\. Go on"
    ):
        stopped.train()
    assert signal.getsignal(signal.SIGINT) is handler
    resumed = trainer_in(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    for (name, one), (_, other) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.not_fast
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer_in(tmp_path, interrupt_at=2, times=2).train()
    assert not (tmp_path / "checkpoint-1").exists()


@pytest.mark.not_fast
def test_without_checkpoints_ctrl_c_is_python_s(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, interrupt_at=2, save_strategy="no")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert not list(tmp_path.glob("checkpoint-*"))
