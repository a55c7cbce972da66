"""Bins under DeepSpeed: its engine divides a loss by ``gradient_accumulation_steps`` unless it is told not to.

DeepSpeed need not be installed (with it: ``tests/distributed/test_zero.py``). The engine below keeps the rules of its
``engine.backward`` that matter: the division (``scale_wrt_gas``), that a loss must have a ``grad_fn``, and that some
weight must get a gradient (ZeRO-2 makes its buckets then; ZeRO-3 forgets the last step's gradients then). It is driven
by accelerate's own wrapper.
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


def leaves(loss: torch.Tensor) -> set[int]:
    """Ids of the tensors that a backward of ``loss`` gives gradients to."""
    found, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        ahead.extend(following for following, _ in node.next_functions)
    return found


class Engine:
    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        self.boundaries: list[bool] = []
        self.weights: set[int] = set()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        assert loss.numel() == 1
        assert loss.grad_fn is not None
        assert leaves(loss) & self.weights, "a backward that reaches no weight"
        (loss / self.accumulation if scale_wrt_gas else loss).backward()

    def step(self) -> None:
        """HF's optimizer steps instead."""


class AsDeepSpeed(LabTrainer):
    engine = Engine(accumulation=3)

    def training_step(self, *given: Any) -> Any:
        self.engine.weights = {id(weight) for weight in self.model.parameters()}
        self.accelerator.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(self.engine)
        with replaced(Accelerator, "distributed_type", property(lambda _: DistributedType.DEEPSPEED)):
            return super().training_step(*given)


@pytest.mark.not_fast
def test_every_bin_counts_the_same(tmp_path: Path, tiny_folder: Path) -> None:
    args = LabConfig(**arguments(tmp_path), update={"max_tokens": 60})
    plain, ours = train(LabTrainer, args, tiny_folder), train(AsDeepSpeed, args, tiny_folder)
    assert len(AsDeepSpeed.engine.boundaries) > 4 * 2, "several bins in a step, or nothing is shown"
    assert sum(AsDeepSpeed.engine.boundaries) == 4
    assert ours.losses == pytest.approx(plain.losses)
    assert weight_difference(ours, plain) == 0.0
