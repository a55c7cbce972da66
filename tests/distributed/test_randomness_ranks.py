"""LoRA dropout on two DDP ranks, of which one holds dead rows only: live rows draw their own masks on either rank, and
the mean gradient is stock's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from distributed.launch import run_worker
from parity.test_randomness import COPIES, gap_in_bounds

pytestmark = pytest.mark.slow


def test_under_dropout(tmp_path: Path) -> None:
    run_worker("dropout_worker", "ddp", 2, tmp_path)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    stock, ours = found["stock"], found["ours"]
    assert float(stock.std(0).min()) > 0, "nothing is random here"
    assert gap_in_bounds(ours, stock) < 1
    assert gap_in_bounds(found["biased"], stock) > 1, "a live row was skipped, unseen"

    here, there = found["one row"]
    assert min(len(here), len(there)) > 1, "both ranks compute copies of the row"
    assert len(here) + len(there) == COPIES
    assert len({*here, *there}) == COPIES, "two copies, on one rank or two, had the same masks"

    one, other = found["a single live row"]  # the other rank has a stand-in, and nobody waits
    assert one == other
    assert all(map(math.isfinite, one))
    assert any(one)
