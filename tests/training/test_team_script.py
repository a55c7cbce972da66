"""The team script of the docs runs as it stands, in a process of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import warm

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "team_surrogate.py"


@pytest.mark.slow
def test_the_team_script_trains(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [warm.python(), str(SCRIPT), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=SCRIPT.parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "surrogate=soft_clip, aggregation=fixed_budget" in done.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_it_is_about_thirty_lines_of_code() -> None:
    lines = [line for line in SCRIPT.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) <= 32
