"""``scripts/compare_methods.py`` and ``scripts/lab_smoke.py`` with small numbers, in processes of their own as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model.tiny.hidden_size": "24",
    "model.tiny.num_layers": "1",
    "cold_start.max_steps": "2",
    "cold_start.data.n": "64",
    "data.n": "64",
}
SMALLER = [word for key, value in TINY.items() for word in ("--set", key, value)]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / words[0]), *words[1:], *SMALLER]
    return subprocess.run(command, env=os.environ | known, capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
def test_two_arms_from_one_start_and_a_lost_record(tmp_path: Path) -> None:
    """The second call trains nothing again: a finished arm is read, one whose record was lost is found trained."""
    words = [
        "compare_methods.py",
        "all",
        "--arms",
        "SFT",
        "Dr.GRPO",
        "--seeds",
        "0",
        "--steps",
        "2",
        "--every",
        "1",
        "--held-out",
        "8",
    ]
    words += ["--folder", str(tmp_path)]
    done = run(*words)
    assert done.returncode == 0, (
        done.stdout + done.stderr + "".join(log.read_text()[-3000:] for log in tmp_path.glob("*.log"))
    )
    records = {arm: json.loads((tmp_path / f"{arm}-0" / "arm.json").read_text()) for arm in ("SFT", "Dr.GRPO")}
    for record in records.values():
        assert [point["step"] for point in record["points"]] == [0, 1, 2]
        assert record["memory_mib"] > 0
    assert records["SFT"]["points"][0]["accuracy"] == records["Dr.GRPO"]["points"][0]["accuracy"]
    tokens = [point["tokens"] for point in records["Dr.GRPO"]["points"]]
    assert 0 == tokens[0] < tokens[1] < tokens[2] <= 2 * 256 * 56
    assert [point["tokens"] for point in records["SFT"]["points"]] == [0, 0, 0]
    assert (tmp_path / "trio.png").is_file() or ("grpo_lab[figures]" in done.stdout and "trio.png" in done.stdout)
    assert "| Dr.GRPO | 1 |" in (tmp_path / "critic.md").read_text()

    kept = (tmp_path / "SFT-0" / "arm.json").stat().st_mtime_ns
    (tmp_path / "Dr.GRPO-0" / "arm.json").unlink()
    again = run(*words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "SFT-0" / "arm.json").stat().st_mtime_ns == kept
    assert "is finished: nothing to do" in (tmp_path / "Dr.GRPO-0.log").read_text().replace("\n", " ")
    assert json.loads((tmp_path / "Dr.GRPO-0" / "arm.json").read_text())["points"] == records["Dr.GRPO"]["points"]


@pytest.mark.slow
def test_smoke_of_two_presets(tmp_path: Path) -> None:
    done = run(
        "lab_smoke.py",
        "--only",
        "gspo",
        "KimiTrainer",
        "--steps",
        "2",
        "--folder",
        str(tmp_path),
        "--set",
        "max_completion_length",
        "8",
    )
    assert done.returncode in (0, 1), (
        done.stderr
    )  # 1: a start that never answers right moves no weight, and that is said
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["gspo", "KimiTrainer"]
    assert all(line.split("|")[2].strip() == "yes" for line in lines[2:])
