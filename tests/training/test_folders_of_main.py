"""Folders that main of 2026-11-27 left (commit 3c3d822d) are read, and gone on with.

`tests/fixtures/main_2026_11.tar.xz`: of each command the recipe, the folder of a finished run (`*_whole`, without its
page) and of one that was broken off (`*_part`): the curation killed within its pass rates; the rounds, long2short and
the pipeline asked to stop in a training, with a checkpoint; the training after checkpoint-2 of 3.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.cli import main

pytestmark = pytest.mark.slow

FOLDERS = Path(__file__).resolve().parents[1] / "fixtures" / "main_2026_11.tar.xz"
RESULTS = {
    "curate": ["pass_rates.jsonl", "guesses.jsonl", "curated.jsonl"],
    "rounds": ["**/samples.jsonl", "**/rows.jsonl", "**/*.safetensors", "rounds.jsonl"],
    "long2short": ["*.jsonl", "*.safetensors"],
    "train": ["metrics.jsonl", "*.safetensors"],
    "pipeline": ["*/samples.jsonl", "*/rows.jsonl", "*/metrics.jsonl", "**/*.safetensors"],
}
"""Command → files that hold what it has made."""
DONE = {
    "curate": ["pass_rates.jsonl"],
    "rounds": ["round-1/*.jsonl", "round-1/model/*", "round-2/samples.jsonl", "round-2/rows.jsonl"],
    "long2short": ["samples.jsonl", "rows.jsonl", "evaluation/before/*"],
    "train": ["evaluation/before/*"],
    "pipeline": ["samples/*", "chosen/*"],
}
"""Command → files that were there when it was broken off, and are not made again."""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(FOLDERS) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path, patterns: list[str]) -> dict[str, bytes]:
    found = (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(command: str, folder: Path) -> int:
    words = ["pipeline", "run", "pipeline.yaml"] if command == "pipeline" else [command, "--config", f"{command}.yaml"]
    return main([*words, "--output_dir", folder.name])


@pytest.mark.parametrize("command", RESULTS)
def test_a_finished_run_is_left_alone(command: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folders / f"{command}_whole"
    before = contents(folder, RESULTS[command])
    stamps = {name: (folder / name).stat().st_mtime_ns for name in before}
    assert run(command, folder) == 0
    assert contents(folder, RESULTS[command]) == before
    if command != "curate":  # which writes its rows anew out of the samples that are there
        assert {name: (folder / name).stat().st_mtime_ns for name in before} == stamps
    if command not in ("curate", "pipeline"):
        assert "nothing to do" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0


@pytest.mark.parametrize("command", RESULTS)
def test_a_run_that_was_broken_off_is_gone_on_with(command: str, folders: Path) -> None:
    folder = folders / f"{command}_part"
    whole = folders / f"{command}_whole"
    done = contents(folder, DONE[command])
    steps = lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    assert run(command, folder) == 0
    now = contents(folder, DONE[command])
    assert {name for name, content in done.items() if now[name][: len(content)] != content} == set()
    if command != "curate":  # whose samples grow
        assert now == done
    assert sorted(contents(folder, RESULTS[command])) == sorted(contents(whole, RESULTS[command]))
    assert not [*folder.glob("**/stopped")], "the checkpoint was gone on with"
    if steps:
        went_on = lines(folder / "metrics.jsonl")
        assert went_on[: len(steps)] == steps, "no step was done again"
        assert [one["step"] for one in went_on] == [one["step"] for one in lines(whole / "metrics.jsonl")]
    if command == "rounds":
        assert [one["questions"] for one in lines(folder / "rounds.jsonl")] == [None, 4, 4]
