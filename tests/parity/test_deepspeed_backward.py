"""Bins under DeepSpeed: its engine divides a loss by ``gradient_accumulation_steps`` unless it is told not to.

DeepSpeed is not installed here. The engine below keeps the two rules of DeepSpeed 0.18's ``engine.backward`` that matter: the division
(``scale_wrt_gas``) and that a loss must have a ``grad_fn``. It is driven by accelerate's own wrapper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.trl_bridge import replaced
from parity.harness import arguments, train, weight_difference


class Engine:
    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        self.boundaries: list[bool] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        assert loss.numel() == 1
        assert loss.grad_fn is not None
        (loss / self.accumulation if scale_wrt_gas else loss).backward()

    def step(self) -> None:
        """HF's optimizer steps instead."""


class AsDeepSpeed(LabTrainer):
    engine = Engine(accumulation=3)

    def training_step(self, *given: Any) -> Any:
        self.accelerator.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(self.engine)
        with replaced(Accelerator, "distributed_type", property(lambda _: DistributedType.DEEPSPEED)):
            return super().training_step(*given)


def test_every_bin_counts_the_same(tmp_path: Path, tiny_folder: Path) -> None:
    args = LabConfig(**arguments(tmp_path), update={"max_tokens": 60})
    plain, ours = train(LabTrainer, args, tiny_folder), train(AsDeepSpeed, args, tiny_folder)
    assert len(AsDeepSpeed.engine.boundaries) > 4 * 3, "several bins in a step, or nothing is shown"
    assert sum(AsDeepSpeed.engine.boundaries) == 4
    assert ours.losses == pytest.approx(plain.losses)
    assert weight_difference(ours, plain) == 0.0
