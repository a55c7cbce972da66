"""Three ranks exchange only the rows that move, and hold, to the bit, what a table of everything would give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.launch import run_worker

pytestmark = pytest.mark.slow


def test_random_steps(tmp_path: Path) -> None:
    """Bins, what comes home, bytes; ranks padded to different widths, fields per row, per token and of a team's own,
    NaN, no row at all."""
    out = tmp_path / "refused.txt"
    run_worker("exchange_worker", "ddp", 3, out)
    assert "the ranks' micro-batches hold different fields" in out.read_text()
