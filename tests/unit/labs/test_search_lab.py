"""The lab of the search: its table by hand, what changes its cells, and every kind of arm in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.labs.search import LAB, SEARCHES, VIEWS, models_of, sizes_of
from grpo_lab.labs.search_report import report

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "stages.0.max_steps": 40, "stages.0.data.n": 3000, "stages.1.data.n": 8, "stages.3.max_steps": 2,
    "stages.4.data.n": 4, "stages.6.max_steps": 2, "problems": 4, "budgets": [50, 150], "samples": 3,
    "beams": [1, 2], "proposals": 2, "rests": 2,
}  # fmt: skip


def options(folder: Path, changes: dict[str, Any]) -> Namespace:
    return Namespace(folder=folder, set=[(key, json.dumps(value)) for key, value in changes.items()])


def method(right: list[list[bool]], had: list[bool]) -> dict[str, Any]:
    return {"right": right, "tokens": [40.0, 190.0], "had": had}


def test_changes_reach_the_sizes_or_the_models(tmp_path: Path) -> None:
    asked = options(tmp_path, SMALL)
    sizes = sizes_of(asked)
    assert (sizes.problems, sizes.budgets, sizes.width) == (4, (50, 150), 4)
    assert models_of(asked)["stages"][0]["max_steps"] == 40
    assert models_of(asked)["output_dir"] == str(tmp_path / "models")
    LAB.check(LAB.arms, asked)
    with pytest.raises(ValueError, match="problems"):
        sizes_of(options(tmp_path, {"problems": 0}))
    for key, said in {
        "stages.1.temperatur": "did you mean 'temperature'",
        "stages.0.max_stes": "did you mean 'max_steps'",
        "problms": "lab 'search' has no setting 'problms'; did you mean 'problems'.*or of its pipeline",
    }.items():
        with pytest.raises(ValueError, match=said):
            LAB.check(LAB.arms, options(tmp_path, {key: 1}))
    with pytest.raises(ValueError, match=r"`budgets` is \[150, 50\]; they must rise"):
        sizes_of(options(tmp_path, {"budgets": [150, 50]}))


def test_the_table_by_hand(tmp_path: Path) -> None:
    """Three problems a seed and two seeds: 2 of 6 right at first, and 4 of 6; a right one was found in 5. Loops of one
    round on four problems."""
    samples = method([[True, False, False], [True, True, False]], [True, True, True])
    other = method([[True, False, False], [True, True, False]], [True, True, False])
    beams = method([[True, False, False], [True, True, True]], [True, True, True])
    space = {"2": {"steps": 1.5, "paths": [4, 8], "inside": [True, False]}}
    judges = {"value": [[1, 0.9, 0.75], [1, 0.2, 0.75], [2, 0.4, 0.0]]}
    start = {"greedy": [1, 0, 0, 0], "search": [1, 0, 0, 0], "majority": [1, 1, 0, 0], "ranked": [0.5, None, 1.0, 0.0]}
    found_by_it: Any = {"solved": 0.5, "right_found": 7}
    better = {"greedy": [1, 1, 1, 0], "search": [1, 1, 1, 1], "majority": [1, 0, 0, 0], "ranked": [None, 1.0, 1.0, 1.0]}
    worse = {"greedy": [0, 0, 0, 0], "search": [1, 0, 0, 0], "majority": [1, 0, 0, 0], "ranked": [None] * 4}
    found: Any = {
        "samples": [{"budgets": [50, 200], "methods": {"majority": one}} for one in (samples, other)],
        "beam search, PRM": [{"budgets": [50, 200], "methods": {"beam search, PRM": beams}}] * 2,
        "space": [{"space": space}],
        "judges": [{"judges": judges}],
        "loop by samples": [{"loop": [start, {**worse, **found_by_it}]}],
        "loop by search": [{"loop": [start, {**better, **found_by_it}]}],
    }
    text = report(found, options(tmp_path, {}))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    by_name = {line[0]: line for line in lines}
    assert by_name["majority"][2].startswith("0.333 [")
    assert by_name["majority"][3].startswith("0.667 [")
    assert by_name["majority"][5:7] == ["190", "0.833"]
    assert by_name["majority"][7].startswith("0.200 [")
    assert by_name["beam search, PRM"][4].startswith("+33.3 [")
    assert by_name["2"][:3] == ["2", "1.50", "6.0"]
    assert [line[1:4] for line in lines if line[0] == "value"] == [
        ["1", "2", "0.500 [0.095, 0.905]"],
        ["2", "1", "1.000 [0.207, 1.000]"],
    ]
    [at_start, after] = [line for line in lines if line[0] == "loop by search"]
    assert [at_start[1], at_start[2][:5], at_start[5][:4], at_start[7][:5]] == ["0", "0.250", "+0.0", "0.500"]
    assert [after[1], *(cell[:5] for cell in after[2:5])] == ["1", "0.750", "1.000", "0.250"]
    assert [after[5][:5], after[6][:5], after[7][:5], *after[8:]] == ["+50.0", "+75.0", "1.000", "0.5", "7"]
    difference = by_name["loop by search less loop by samples"]
    assert [cell[:5] for cell in difference[2:5]] == ["+75.0", "+75.0", "+0.0 "]
    assert (tmp_path / "curves.png").is_file()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_runs_searches_and_views_and_repeats_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_lab", "lab", "search", "--folder", str(tmp_path), "--seeds", "0"]
    command += ["--arms", *SEARCHES, *VIEWS]
    command += [word for key, value in SMALL.items() for word in ("--set", key, json.dumps(value))]
    how: Any = {"capture_output": True, "text": True, "timeout": 1800, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    first = subprocess.run(command, **how)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    assert "| tree search, PRM |" in (tmp_path / "table.md").read_text()
    again = subprocess.run(command, **how)
    assert again.returncode == 0
    assert "samples, seed 0 ..." not in again.stdout
