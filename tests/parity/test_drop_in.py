"""Change one import and nothing else changes (issue A, must show 9): with ``objective`` unset, ``LabTrainer`` gives the same
metrics and weights as stock TRL 1.16 on the same seed, for every option of ``GRPOConfig`` that runs on a CPU.

Completions come from the model itself (transformers' ``generate``), so a difference in any weight, random number or batch
shows in the next step's completions as well. Metrics: every value that stock logs, within 1e-5. Weights: within 1e-6.
``entropy`` is a mean over the rows that were computed; where rows with advantage 0 are skipped it is another mean than
stock's (docs/metrics.md), so such cases are compared twice: with ``dead_groups: keep`` all of it, with ``skip`` without it.

Not here: what needs a GPU, a server or the hub (vLLM, DeepSpeed, FSDP, quantisation, Liger, hub uploads).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from parity.drop_in_cases import CASES
from parity.harness import Run, movement_difference, weight_difference
from parity.stock_like import Case, metric_differences, run


def params(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ()) for case in cases]


def assert_same(ours: Run, stock: Run, without: tuple[str, ...] = ()) -> None:
    assert metric_differences(ours, stock, without) == []
    assert weight_difference(ours, stock) <= 1e-6
    moved = max((value - stock.start[name]).abs().max().item() for name, value in stock.weights.items())
    assert moved > 0, "stock did not train: nothing was compared"
    assert movement_difference(ours, stock) <= 1e-4


@pytest.mark.parametrize("case", params(CASES))
def test_same_as_stock(case: Case, models: dict[str, Path], tmp_path: Path) -> None:
    stock = run(GRPOTrainer, GRPOConfig, case, models, tmp_path / "stock")
    variants: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [(LabConfig, {}, ())]
    if case.dead_rows:
        variants = [(LabConfig, {"update": {"dead_groups": "keep"}}, ()), (LabConfig, {}, ("entropy",))]
    if case.plain:
        variants.append((GRPOConfig, {}, ("entropy",) if case.dead_rows else ()))
    for number, (config, more, without) in enumerate(variants):
        ours = run(LabTrainer, config, case, models, tmp_path / f"ours{number}", **more)
        assert_same(ours, stock, without)
        reason = ours.trainer.algorithm.left_to_trl
        assert reason is None if case.left_to_trl is None else case.left_to_trl in reason
