"""``tests/stress/kill_in_turns.py`` with one kill of each kind; with five of each: `-m thorough`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.thorough)])
def test_no_call_is_made_twice_and_weights_are_as_promised(kills: int, tmp_path: Path) -> None:
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    words = ["--kills", str(kills), "--steps", str(2 * kills), "--folder", str(tmp_path)]
    command = [sys.executable, str(ROOT / "tests" / "stress" / "kill_in_turns.py"), *words]
    done = subprocess.run(command, env=os.environ | known, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count(f"kills={kills}") == 2
