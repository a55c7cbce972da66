"""Credit for turns on 1 and 2 real ranks, by every rule and with both denominators: the float64 loop's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed.launch import run_worker
from distributed.turn_credit_worker import CASES, STEPS
from parity.harness import Run, assert_same_movement, movement_difference
from turn_oracle import RULES, environment_of, replayed, turns_of

pytestmark = pytest.mark.slow


@pytest.mark.thorough(but="2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_final_weights(ranks: int, tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("turn_credit_worker", "ddp" if ranks > 1 else "single", ranks, tiny_folder, tmp_path)
    start = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).state_dict()
    for rule, objective in CASES:
        report = json.loads((tmp_path / f"{rule}-{objective}.json").read_text())
        assert report["world"] == ranks
        assert [len(completions) for _, completions in report["batches"]] == [12] * STEPS
        prompts = [ids for batch in report["batches"] for ids in batch[0]]
        completions = [ids for batch in report["batches"] for ids in batch[1]]
        assert len({type(environment_of(prompt)) for prompt in prompts}) == 3
        assert len({len(turns_of(ids)) for ids in completions}) > 3
        expected = replayed(tiny_folder, report["batches"], RULES[rule], objective)
        found = torch.load(tmp_path / f"{rule}-{objective}.pt", weights_only=True)
        ours = Run([], [], found, start, [], None)
        theirs = Run([], [], expected, start, [{"step": STEPS}], None)
        assert_same_movement(ours, theirs)
        assert movement_difference(ours, theirs) < 1e-5
