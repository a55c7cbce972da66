"""A preference model in training on two ranks: the same one on both, from the comparisons that one rank makes of the
same batches; resumed likewise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distributed.launch import run_worker
from distributed.preference_worker import ROWS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def preference(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


def left(ranks: int, policy: Path, preference: Path, out: Path) -> dict[str, Any]:
    out.mkdir()
    run_worker("preference_worker", "ddp" if ranks > 1 else "single", ranks, policy, preference, out)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in ("whole", "resumed")}


def test_both_ranks_keep_the_model_that_one_rank_keeps(tiny_folder: Path, preference: Path, tmp_path: Path) -> None:
    one, two = (left(ranks, tiny_folder, preference, tmp_path / str(ranks)) for ranks in (1, 2))
    for name, found in two.items():
        assert len(found["ranks"]) == 2
        assert found["ranks"][0] == found["ranks"][1], name
        assert found["ranks"][0]["pairs"] == one[name]["ranks"][0]["pairs"], name
        assert found["tokens"] == one[name]["tokens"]
    assert two["resumed"]["ranks"] == two["whole"]["ranks"]
    assert two["resumed"]["tokens"] == two["whole"]["tokens"]
    assert len(one["whole"]["ranks"][0]["pairs"]) > ROWS
    logged = ("preference/comparisons", "preference/pair_accuracy", "rewards/preference_reward/mean")
    for mine, theirs in zip(two["whole"]["logged"], one["whole"]["logged"], strict=True):
        said = {key: value for key, value in theirs.items() if key in logged}
        assert {key: mine.get(key) for key in said} == pytest.approx(said, rel=1e-3, abs=1e-5)
    assert any("preference/pair_accuracy" in row for row in one["whole"]["logged"])
