"""``tests/stress/kill_anywhere.py`` with three kills: one process and two ranks go on to the bit. Thirty:
`docs/reliability.md`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_killed_three_times_is_the_uninterrupted_one_to_the_bit(tmp_path: Path) -> None:
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    words = ["--of", "lab-1", "lab-2", "--kills", "3", "--steps", "9", "--folder", str(tmp_path)]
    command = [sys.executable, str(ROOT / "tests" / "stress" / "kill_anywhere.py"), *words]
    done = subprocess.run(command, env=os.environ | known, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for setting in ("lab-1", "lab-2"):
        lives = json.loads((tmp_path / setting / "record.json").read_text())["lives"]
        assert sum(len(life["kills"]) for life in lives) == 3
        assert all(life["weights_equal"] and life["rows_different"] == 0 and life["rows"] == 9 for life in lives)
    assert "| grpo_lab | 2 | 3 |" in done.stdout
