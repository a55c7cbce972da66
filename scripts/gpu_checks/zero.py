"""DeepSpeed: the exact update under ZeRO-2 and ZeRO-3 against one plain process, by ``accelerate launch`` with the
recipes' files.

One process on a GPU, two gloo ranks on a CPU (``DS_ACCELERATOR=cpu``); float32. Worker, rollouts and bound are the test
suite's (``tests/distributed``): what another order of float32 sums may make of the movement.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpu_checks.parity import models
from gpu_checks.runner import Row, Setting

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from distributed.cases import SPLIT, Case
from distributed.launch import HERE, World, train_cases
from distributed.test_ranks import first_weights, relative_difference, rounding
from parity.harness import ONE_ROW_IN_A_HUNDRED

CASES = (
    Case("dr_grpo-sparse", SPLIT, {"objective": "dr_grpo"}, reward="sparse"),
    Case("dapo", SPLIT, {"objective": "dapo"}),
)


def zero_of(stage: int) -> Any:
    """The section of one ZeRO stage: a row a training."""

    def section(setting: Setting) -> list[Row]:
        plain = launched(setting, "single", 1)
        sharded = launched(setting, f"zero{stage}", 1 if setting.gpu else 2)
        start, rows = first_weights(models(setting)), []
        for case in CASES:
            found, expected = sharded.weights(case.name), plain.weights(case.name)
            apart = relative_difference(found, expected) / relative_difference(start, expected)
            bound, report = rounding(expected, start, 4), sharded.report(case.name)
            rows.append(
                {"case": case.name, "kind": report["kind"], "stage": report["zero_stage"], "processes": report["world"]}
                | {"movement": apart, "bound": bound}
                | {"pass": report["zero_stage"] == stage and apart <= bound < ONE_ROW_IN_A_HUNDRED}
            )
        return rows

    return section


def launched(setting: Setting, config: str, processes: int) -> World:
    """The trainings in ``processes`` processes; each world has the same rows in every optimizer step."""
    plain_cpu = config == "single" and not setting.gpu
    runs = [case.spec(processes) for case in CASES]
    for run in runs:
        run["args"]["use_cpu"] = plain_cpu  # accelerate leaves DeepSpeed out of a run that asks for a CPU
    more = {"ACCELERATE_USE_CPU": str(plain_cpu).lower()}
    before: list[str] = []
    if config != "single" and not setting.gpu:
        more |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
        before = [str(HERE / "cpu_zero.py")]
    timeout = max(setting.left() - 10, 1)  # it ends its own launch before this process is ended
    out = setting.folder / config
    return train_cases(processes, models(setting), out, runs, config, before, timeout=timeout, **more)
