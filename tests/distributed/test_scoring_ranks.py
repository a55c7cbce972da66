"""Two ranks, padded to widths of their own, train as one: KL per token, advantages per token, selection, and all at
once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed.launch import run_worker
from distributed.scoring_worker import RUNS
from tolerance import movement_gap, sum_gap

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worlds(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {}
    for processes in (1, 2):
        found[processes] = tmp_path_factory.mktemp(f"scoring{processes}")
        run_worker("scoring_worker", "ddp", processes, tiny_folder, found[processes])
    return found


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one(name: str, worlds: dict[int, Path], tiny_folder: Path) -> None:
    one, two = (torch.load(worlds[processes] / f"{name}.pt", weights_only=False) for processes in (1, 2))
    start = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).state_dict()
    moved = _norm({n: one["weights"][n].double() - v.double() for n, v in start.items()})
    apart = _norm({n: one["weights"][n].double() - two["weights"][n].double() for n in start})
    assert moved > 1e-3, "hardly trained: nothing is compared"
    assert apart / moved <= movement_gap(torch.float32, _norm(start), moved, one["steps"])
    assert one["rounds"] == two["rounds"]
    assert ("selected" in name) == (max(one["rounds"], default=0) > 1)
    assert one["logged"]["completion"] == two["logged"]["completion"]
    # a mean of 30 terms of size 4 in another width, of weights that are off by the gap above
    gap = sum_gap(torch.float32, 4.0 * 30, 30) + 4 * apart
    assert two["logged"]["advantages"] == pytest.approx(one["logged"]["advantages"], abs=gap)


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(sum(value.double().square().sum().item() for value in tensors.values()) ** 0.5)
