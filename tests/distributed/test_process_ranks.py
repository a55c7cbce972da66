"""``advantage: process`` on 1, 2 and 4 real ranks, two updates a generation, whole and resumed between them: the
float64 loop's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed.launch import run_worker
from distributed.process_worker import UPDATES
from parity.harness import Run, assert_same_movement
from process_oracle import GROUP, replayed, scored

pytestmark = pytest.mark.slow


@pytest.mark.thorough(but="2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_final_weights(ranks: int, tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("process_worker", "ddp" if ranks > 1 else "single", ranks, tiny_folder, tmp_path)
    start = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).state_dict()
    for update in UPDATES:
        report = json.loads((tmp_path / f"{update}.json").read_text())
        assert report["world"] == ranks
        assert [len(completions) for _, completions in report["batches"]] == [12, 12]
        assert report["calls after"] == [0] * ranks, "the resumed run goes on inside the second generation"
        shapes = {
            tuple(len(scored(ids)) for ids in rows[at : at + GROUP])
            for _, rows in report["batches"]
            for at in (0, 4, 8)
        }
        assert len(shapes) > 3, "ragged"
        found = torch.load(tmp_path / f"{update}.pt", weights_only=True)
        assert all(torch.equal(value, found["whole"][name]) for name, value in found["resumed"].items())
        expected = replayed(tiny_folder, report["batches"], 2)
        ours = Run([], [], found["resumed"], start, [], None)
        assert_same_movement(ours, Run([], [], expected, start, [{"step": 4}], None))
