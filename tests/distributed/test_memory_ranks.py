"""A bin of one rank runs out of memory: under DDP both plan anew with half the tokens, under FSDP2 it is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.launch import run_worker
from distributed.memory_worker import BEGIN

pytestmark = pytest.mark.slow


def reports(kind: str, model: Path, folder: Path) -> list[dict[str, Any]]:
    run_worker("memory_worker", kind, 2, model, folder, kind)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_ranks_plan_anew_together(tiny_folder: Path, tmp_path: Path) -> None:
    first, second = reports("ddp", tiny_folder, tmp_path)
    for where in ("forward", "backward"):
        assert first[where] == second[where]
        assert first[where]["tokens"] <= BEGIN // 2
        assert first[where]["same"], "the run with half the tokens, to the bit"
        assert first[where]["bins"] == first[where]["of fixed"]
        assert first[where]["apart"] < 1e-6


def test_where_forwards_are_collectives_it_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    for report in reports("fsdp2", tiny_folder, tmp_path):
        assert "under FSDP the other ranks wait in its forward" in report["error"]
        assert "set `update.max_tokens: " in report["error"]
