"""Metrics of two ranks by hand: rows left out, dummy bins where a rank has none, bins that are one token wide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.launch import run_worker

pytestmark = pytest.mark.slow


def test_every_metric_of_two_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("metrics_worker", "ddp", 2, tiny_folder, tmp_path)
    for kind in ("token", "sequence"):
        seen = (tmp_path / f"{kind}.txt").read_text().split()
        assert {"clip_ratio/low_mean", "clip_ratio/low_min", "entropy", "update/tokens_computed"} <= set(seen)
    # two ranks · 2 rows · 3 micro-batches, budget 32; in an on-policy step Σ|w| = Σ_t|Â|/(rows · budget)
    first = json.loads((tmp_path / "token" / "token_weights.jsonl").read_text().splitlines()[0])
    for bucket in [*first["by_length"], *first["by_pass_rate"]]:
        assert bucket["weight"] == pytest.approx(bucket["token_advantage"] / (12 * 32), rel=1e-5, abs=1e-12)
    assert sum(bucket["token_advantage"] for bucket in first["by_length"]) > 0
    assert sum(bucket["rows"] for bucket in first["by_pass_rate"]) <= 12
