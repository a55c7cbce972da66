"""``grpo_lab.labs.experiment``: cells in processes of their own, and what is not repeated; the declared comparisons of
``scripts/compare.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import compare
import pytest

from grpo_lab import LabConfig
from grpo_lab.labs.experiment import record_file, spread, table
from grpo_lab.recipe.sections import read_recipe
from grpo_lab.trainer.settings.algorithm import algorithm_from

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os
from grpo_lab.labs.experiment import Experiment, carry_out, changes_asked, parser, table, write_whole_text

def run(arm, seed, folder, options):
    if arm == "breaks" and "well" not in changes_asked(options):
        raise RuntimeError("as it should")
    return {"before": {"pid": 0.5}, "after": {"pid": float(os.getpid())}}

def prepare(options):
    with (options.folder / "prepared").open("a") as file:
        file.write("once\\n")

carry_out(Experiment(["one, two", "breaks"], run, lambda found, _: table(found), prepare), \
parser(None, "x").parse_args())
"""


@pytest.mark.slow
def test_cells_run_once_each_in_a_process_of_its_own_and_a_failure_costs_only_itself(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "cells"
    script.write_text(SCRIPT)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), "--folder", str(folder), "--seeds", "0", "1", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    done = call("--at-most", "3", "--jobs", "2")
    assert done.returncode == 1
    assert "not run: breaks, seed 0: exit code 1, see " in done.stderr
    assert "RuntimeError: as it should" in (folder / "breaks-0.log").read_text()
    kept = {seed: json.loads(record_file(folder, "one, two", seed).read_text()) for seed in (0, 1)}
    assert kept[0]["after"]["pid"] != kept[1]["after"]["pid"]
    assert [(kept[seed]["arm"], kept[seed]["seed"]) for seed in (0, 1)] == [("one, two", 0), ("one, two", 1)]
    assert kept[0]["memory_mib"] >= 0 <= kept[0]["process_seconds"]
    done = call("--set", "well", "true")
    assert done.returncode == 0, done.stderr
    assert {seed: json.loads(record_file(folder, "one, two", seed).read_text()) for seed in (0, 1)} == kept
    assert done.stdout.count("| breaks | 2 |") == done.stdout.count("| (start) | – | 0.500 |") == 1
    assert (folder / "prepared").read_text() == "once\n" * 2
    assert (
        call("--arms", "no such", "--at-most", "0")
        .stderr.strip()
        .endswith("--arms no such: there are one, two, breaks")
    )


def test_a_table_by_hand() -> None:
    runs = [
        {"before": {"a": 0.25}, "after": {"a": 0.5, "b": 1.0}},
        {"before": {"a": 0.25}, "after": {"a": 1.0, "b": float("nan")}},
    ]
    assert table({"arm": runs}).splitlines() == [
        "| arm | seeds | a | b |",
        "| --- | --- | --- | --- |",
        "| (start) | – | 0.250 | – |",
        "| arm | 2 | 0.750 ± 3.177 (0.500, 1.000) | 1.000 |",  # 12.706 · 0.3536/√2
    ]
    assert spread([]) == "–"


def changes(name: str, arm: str, gamma: float | None = None) -> Any:
    found = compare.EXPERIMENTS[name].arms[arm]
    return found(Namespace(gamma=gamma, start=Path("run/second_sft/model")), 0) if callable(found) else found


@pytest.mark.parametrize("gamma", [None, 0.9])
def test_the_reinforce_menu_is_twelve_algorithms(gamma: float | None) -> None:
    seen = set()
    for arm in compare.EXPERIMENTS["reinforce"].arms:
        config = LabConfig(output_dir="x", use_cpu=True, bf16=False, **changes("reinforce", arm, gamma))
        found = algorithm_from(config, config.lab_settings)
        seen.add((str(found.advantage), str(found.objective.surrogate)))
    assert len(seen) == 12
    assert all(("Returns" in rule) is (gamma is not None) for rule, _ in seen)


@pytest.mark.parametrize("name", sorted({*compare.EXPERIMENTS} - {"curation"}))
def test_arms_are_recipes_and_no_two_are_the_same(name: str) -> None:
    """What a declared change says is a setting of that recipe; a curation's arms are rows that are chosen first."""
    one = compare.EXPERIMENTS[name]
    read = [read_recipe(compare.RECIPES / one.recipe, {**one.settings, **changes(name, arm)}) for arm in one.arms]
    assert len({repr(recipe) for recipe in read}) == len(read) > 1
