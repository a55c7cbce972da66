"""A rank that stops answering: the others end within the limit, and their error says where they waited, and for
whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.launch import run_worker

pytestmark = pytest.mark.slow

LIMIT = 12
"""Seconds; on a machine that is busy with something else one rank comes some later than the other to every
collective."""


def test_a_rank_that_sleeps_for_ever_is_named_and_the_launch_ends(tiny_folder: Path, tmp_path: Path) -> None:
    """As it was: half an hour on CPU ranks whatever `ddp_timeout` said, and then «Timed out waiting 1800000ms for recv
    operation»."""
    with pytest.raises(AssertionError) as ended:
        run_worker("late_worker", "ddp", 2, tiny_folder, tmp_path, str(LIMIT))
    output = str(ended.value)
    assert (tmp_path / "error.json").is_file(), output
    error = json.loads((tmp_path / "error.json").read_text())
    assert LIMIT - 1 < error["waited"] < 600  # the first rank came to the reward first or last
    said = error["said"]
    assert said.startswith(
        f"rank 0 of 2 waited {LIMIT} s at «training › step › rewards», step 2, and not all ranks came"
    )
    assert "Rank 1 is at «training › step › rewards», step 2, for " in said
    assert "late_worker.py:" in said, said
    assert "in __call__" in said
    assert "--resume" in said
    assert "Timed out waiting" in said
    assert "rank 1 of 2 is at «training › step › rewards», step 2" in output  # its own warning, at half of the limit
