"""A moving reference and a steered β on two ranks, whole on each (DDP) and sharded (FSDP2): moved, saved and resumed to
the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from distributed.launch import run_worker
from grpo_lab.trainer.resume.state import REFERENCE

pytestmark = pytest.mark.slow


@pytest.mark.thorough(but="fsdp2")
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_two_ranks(config: str, tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("reference_worker", config, 2, tiny_folder, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for report in ranks:
        assert report["fsdp2"] is (config == "fsdp2")
        assert report["share"] == pytest.approx(0.5 if config == "fsdp2" else 1.0, abs=0.02)
        assert report["reference moved"]
        assert report["reference is the policy"]  # step 6 is the last one
        assert report["weights equal"]
        assert report["references equal"]
        assert report["histories equal"]
        assert len(set(report["betas"])) == 3
        assert report["last beta"][0] == report["last beta"][1]
    assert ranks[0]["last beta"] == ranks[1]["last beta"]
    saved = tmp_path / "whole" / "checkpoint-3" / REFERENCE / "00000.safetensors"
    with safe_open(saved, framework="pt") as stored:  # whole, however many ranks it came from
        assert list(stored.get_tensor("model.embed_tokens.weight").shape)[1] == 32
