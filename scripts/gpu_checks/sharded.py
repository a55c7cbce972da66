"""Sections about FSDP2 and DeepSpeed's ZeRO: the exact update with the recipes' accelerate files, against one plain
process, in float32.

On a GPU it is one process, started by ``accelerate launch``; on a CPU two gloo ranks. Worker, rollouts and bound are
the test suite's (``tests/distributed``). The bound is what another order of float32 sums may change in the movement of
the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from distributed.cases import SPLIT, Case
from distributed.launch import World, train_cases
from distributed.test_ranks import first_weights, relative_difference, rounding
from gpu_checks.parity import models
from gpu_checks.section import Row, Setting, verdict
from parity.harness import ONE_ROW_IN_A_HUNDRED

CASES = (
    Case("dr_grpo-sparse", SPLIT, {"objective": "dr_grpo"}, reward="sparse"),
    Case("dapo", SPLIT, {"objective": "dapo"}),
)


def fsdp2(setting: Setting) -> Iterator[Row]:
    """Compare FSDP2."""
    yield from compared(setting, "fsdp2", lambda report: report["fsdp2"] is True)


def zero(setting: Setting, stage: int) -> Iterator[Row]:
    """Compare DeepSpeed's ZeRO of a stage."""
    yield from compared(setting, f"zero{stage}", lambda report: report["zero_stage"] == stage)


def compared(setting: Setting, config: str, is_so: Any) -> Iterator[Row]:
    """Yield a verdict for each case: how far the weights' movement with ``config`` is from that of one plain process.
    ``is_so(report)`` returns whether the run was sharded as ``config`` says."""
    plain = launched(setting, "single", 1)
    processes = 1 if setting.gpu else 2
    sharded = launched(setting, config, processes)
    start = first_weights(models(setting))
    for case in CASES:
        found = on_cpu(sharded.weights(case.name))
        expected = on_cpu(plain.weights(case.name))
        apart = relative_difference(found, expected) / relative_difference(start, expected)
        bound = rounding(expected, start, 4)
        report = sharded.report(case.name)
        asked = f"{case.name}, {config} on {processes} process(es): movement from a plain one's"
        passed = is_so(report) and apart <= bound < ONE_ROW_IN_A_HUNDRED
        yield verdict(asked, apart, f"<= {bound:.1e}", bool(passed), kind=report["kind"])


def launched(setting: Setting, config: str, processes: int) -> World:
    """Run the trainings of all cases in ``processes`` processes. Any number of processes has the same rows in an
    optimizer step."""
    use_cpu = not setting.gpu and not config.startswith("zero")
    runs = [case.spec(processes) for case in CASES]
    for run in runs:
        run["args"]["use_cpu"] = use_cpu  # accelerate leaves DeepSpeed out of a run that asks for a CPU
    more = {"ACCELERATE_USE_CPU": str(use_cpu).lower()}
    if config.startswith("zero") and not setting.gpu:
        more |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    out = setting.own / config
    return train_cases(processes, models(setting), out, runs, config, cold=setting.gpu, on_gpu=setting.gpu, **more)


def on_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.cpu() for name, weight in weights.items()}
