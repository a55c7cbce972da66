"""Rules of the levels ``table`` and ``token`` on 1 and 2 real ranks, two updates a generation: the float64 loop's
weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed.launch import run_worker
from distributed.rules_worker import RUNS, literal
from parity.harness import Run, assert_same_movement
from process_oracle import replayed

pytestmark = pytest.mark.slow


@pytest.mark.thorough(but="2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_final_weights(ranks: int, tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("rules_worker", "ddp" if ranks > 1 else "single", ranks, tiny_folder, tmp_path)
    start = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).state_dict()
    for name, (rule, _, _) in RUNS.items():
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert report["world"] == ranks
        expected = replayed(tiny_folder, report["batches"], 2, functools.partial(literal, rule))
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert_same_movement(Run([], [], found, start, [], None), Run([], [], expected, start, [{"step": 4}], None))
