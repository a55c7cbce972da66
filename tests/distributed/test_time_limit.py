"""A rank that stops answering: the others end within the limit, and their error says where they waited, and for whom."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from distributed.launch import HERE, PATHS, RECIPES, end_with_children, launcher

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

LIMIT = 6


def test_a_rank_that_sleeps_for_ever_is_named_and_the_launch_ends(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: half an hour on CPU ranks whatever `ddp_timeout` said, and then «Timed out waiting 1800000ms for recv operation»."""
    for name, value in {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": PATHS}.items():
        monkeypatch.setenv(name, value)
    words = [str(HERE / "late_worker.py"), str(tiny_folder), str(tmp_path), str(LIMIT)]
    started = subprocess.Popen(
        [*launcher(RECIPES / "ddp.yaml", 2), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=180)
    finally:
        end_with_children(started.pid)
    ended = time.time()
    assert started.returncode != 0
    assert (tmp_path / "error.json").is_file(), output[-4000:]
    error = json.loads((tmp_path / "error.json").read_text())
    assert (
        LIMIT - 1 < error["waited"] < LIMIT + 15
    )  # the first rank came to the reward first or last, on a loaded machine
    assert (
        ended - float((tmp_path / "0.came").read_text()) < LIMIT + 60
    )  # torch's launcher gives the other rank 30 s to end
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
