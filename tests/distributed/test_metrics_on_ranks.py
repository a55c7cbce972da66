"""Metrics of two ranks by hand: rows left out, dummy bins where a rank has none, bins that are one token wide."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.launch import HERE, RECIPES, accelerate_launch

pytestmark = pytest.mark.slow


def test_every_metric_of_two_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    accelerate_launch(RECIPES / "ddp.yaml", 2, [str(HERE / "metrics_worker.py"), str(tiny_folder), str(tmp_path)])
    for kind in ("token", "sequence"):
        seen = (tmp_path / f"{kind}.txt").read_text().split()
        assert {"clip_ratio/low_mean", "clip_ratio/low_min", "entropy", "update/tokens_computed"} <= set(seen)
