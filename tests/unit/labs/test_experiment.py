"""``grpo_lab.labs.experiment``: cells in processes of their own, and what is not repeated."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_lab.labs.cells import record_file
from grpo_lab.labs.experiment import Experiment, parser, program, run_experiment
from grpo_lab.labs.forks import LOCKED, CellForks
from grpo_lab.labs.tables import spread, table
from grpo_lab.runs.stop_requests import StoppedByUser

SCRIPT = """
import os
from grpo_lab.labs.experiment import Experiment, run_experiment, parser, write_whole_text
from grpo_lab.labs.tables import table

def run(arm, seed, folder, options):
    if arm == "breaks" and not (options.folder / "well").exists():
        raise RuntimeError("as it should \\x1b]0;owned\\x07")
    return {"before": {"pid": 0.5}, "after": {"pid": float(os.getpid())}}

def prepare(options):
    with (options.folder / "prepared").open("a") as file:
        file.write("once\\n")

imported = ["grpo_lab.labs.experiment"]
experiment = Experiment(["one, two", "breaks"], run, lambda found, _: table(found), prepare, imports=imported)
run_experiment(experiment, parser(None, "x").parse_args())
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
    log = (folder / "breaks-0.log").read_text()
    assert "RuntimeError: as it should ␛]0;owned␇" in log
    assert "\x1b" not in log
    kept = {seed: json.loads(record_file(folder, "one, two", seed).read_text()) for seed in (0, 1)}
    assert kept[0]["after"]["pid"] != kept[1]["after"]["pid"]
    assert [(kept[seed]["arm"], kept[seed]["seed"]) for seed in (0, 1)] == [("one, two", 0), ("one, two", 1)]
    assert kept[0]["memory_mib"] >= 0 <= kept[0]["process_seconds"]
    (folder / "well").touch()
    done = call()
    assert done.returncode == 0, done.stderr
    assert {seed: json.loads(record_file(folder, "one, two", seed).read_text()) for seed in (0, 1)} == kept
    assert done.stdout.count("| breaks | 2 |") == done.stdout.count("| (start) | – | 0.500 |") == 1
    assert json.loads((folder / "records.json").read_text())["one, two"] == [kept[0], kept[1]]
    assert (folder / "prepared").read_text() == "once\n" * 2
    assert (
        call("--arms", "no such", "--at-most", "0")
        .stderr.strip()
        .endswith("--arms: no arm is called 'no such'. Allowed: ['one, two', 'breaks']")
    )


def asked(folder: Path, *words: str) -> argparse.Namespace:
    return parser(None, str(folder)).parse_args(["--folder", str(folder), *words])


def test_ctrl_c_says_which_cells_are_done_and_the_next_call_goes_on(tmp_path: Path) -> None:
    ran: list[int] = []

    def run(arm: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
        if seed == 1 and 1 not in ran:
            ran.append(seed)
            raise KeyboardInterrupt
        ran.append(seed)
        return {"before": {}, "after": {"a": 1.0}}

    lab = Experiment(["one"], run, lambda found, _: table(found), in_process=True)
    with pytest.raises(StoppedByUser, match=re.escape(f"1 of 2 cells, in {tmp_path}; the same command goes on")):
        run_experiment(lab, asked(tmp_path, "--seeds", "0", "1", "0"))
    run_experiment(lab, asked(tmp_path, "--seeds", "0", "1", "0"))
    assert ran == [0, 1, 1]  # a seed that is named twice is one cell


def test_after_ctrl_c_no_other_cell_begins(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    with CellForks(["json"]) as forks:
        assert forks.run([str(script)], [], tmp_path / "first") == -signal.SIGINT  # the cell hears it
        assert "KeyboardInterrupt" in (tmp_path / "first").read_text()
        os.kill(forks._server.pid, signal.SIGINT)
        assert forks.run([str(script)], [], tmp_path / "second") != 0
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("words", [["--seeds", "-1"], ["--jobs", "0"], ["--at-most", "two"]])
def test_an_option_that_is_no_such_number_is_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        asked(tmp_path, *words)
    option, value = words
    assert f"argument {option}: '{value}'; it must be a whole number of at least " in capsys.readouterr().err


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


def test_the_start_of_a_table_is_that_of_all_seeds() -> None:
    """Greedy answers are the same for each seed, and samples are not; the mean of 0.1, 0.2, 0.3 has an interval of
    4.30265 · 0.1 / √3."""
    runs = [
        {
            "seed": seed,
            "before": {"greedy": 0.5, "sampled": sampled},
            "after": {"greedy": 1.0, "sampled": 1.0, "late": 2.0},
        }
        for seed, sampled in enumerate([0.1, 0.2, 0.3])
    ]
    start = table({"arm": runs}).splitlines()[2]
    assert start == "| (start) | – | 0.500 | 0.200 ± 0.248 (0.100, 0.200, 0.300) | – |"


def test_a_cell_is_started_as_its_experiment_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """``__main__.py`` of a package, run as a script, would find ``grpo_lab/io.py`` as ``io``."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/grpo-lab", "lab", "bias"])
    assert program() == ["/somewhere/bin/grpo-lab"]
    main.__spec__ = ModuleSpec("grpo_lab.__main__", None)
    assert program() == ["-m", "grpo_lab"]
    main.__spec__ = ModuleSpec("scripts.lab_smoke", None)
    assert program() == ["-m", "scripts.lab_smoke"]


def test_forks_run_a_program_as_a_process_of_its_own_does(tmp_path: Path) -> None:
    """Its words, streams, exit code and main module; what one fork changes, the next does not see."""
    script, log = tmp_path / "program.py", tmp_path / "log"
    script.write_text(
        "import json, sys, os\n"
        "assert __name__ == '__main__' and not hasattr(json, 'mine')\n"
        "json.mine = True\n"
        "print(sys.argv[1:], sys.stdin.read(), os.getpid())\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    with CellForks(["json"]) as forks:
        assert [forks.run([str(script)], [code, "b c"], log) for code in ("0", "3")] == [0, 3]
        assert forks.run([str(script)], ["no number"], log) == 1
        with log.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert forks.run([str(script)], ["0"], log) == LOCKED
    lines = log.read_text().splitlines()
    assert [line.rpartition(" ")[0].strip() for line in lines[:2]] == ["['0', 'b c']", "['3', 'b c']"]
    assert len({line.rpartition(" ")[2] for line in lines[:2]}) == 2
    assert lines[-1].startswith("ValueError: invalid literal for int()")
