"""Run folders that an earlier version left are read, and gone on with, by this one.

`tests/fixtures/earlier.tar.xz`: what grpo_lab at commit 4cbcf2a (2026-11-22, before the upper floors were rebuilt) left
on disk, with the recipes that made it, the start model and the team's rewards. `*_stopped` were killed with −9 (train:
after checkpoint-10 of 16, in an open generation batch with a prioritized sampler, a reference that had moved and an
adaptive β; PPO: after checkpoint-5 of 8; curation: within its pass rates; rounds: within the second round; long2short:
after its rows). `*_went_on/metrics.jsonl`: what that version logged when it went on.
"""

from __future__ import annotations

import json
import math
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.cli import main

pytestmark = pytest.mark.slow

EARLIER = Path(__file__).resolve().parents[1] / "fixtures" / "earlier.tar.xz"
TEXTS = ("reward", "completions/mean_length", "rewards/vowels/mean")
"""Logged of the completions' texts alone: equal where the same texts were sampled, whatever CPU rounds their
log-probs."""


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tarfile.open(EARLIER) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("earlier_team", None)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def contents(folder: Path, *patterns: str) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for pattern in patterns for file in folder.glob(pattern)}


@pytest.mark.parametrize(
    ("run", "first", "open_to", "last"), [("train_stopped", 11, 12, 16), ("ppo_stopped", 6, 6, 8)], ids=["grpo", "ppo"]
)
def test_a_killed_training_is_gone_on_with(earlier: Path, run: str, first: int, open_to: int, last: int) -> None:
    """The generation batch that was open (up to step ``open_to``) holds the earlier version's completions; after it
    come draws of this version's, of the same distribution: it takes one random number a token."""
    before = lines(earlier / run / "metrics.jsonl")
    assert main(["train", "--config", f"{run}.yaml", "--resume"]) == 0
    now = lines(earlier / run / "metrics.jsonl")
    assert now[: first - 1] == before[: first - 1]
    then = lines(earlier / run.replace("stopped", "went_on") / "metrics.jsonl")
    assert [line["step"] for line in now] == [line["step"] for line in then] == list(range(1, last + 1))
    for name in TEXTS:
        assert [line.get(name) for line in now[:open_to]] == [line.get(name) for line in then[:open_to]], name
        assert [name in line for line in now] == [name in line for line in then], name
    assert all(math.isfinite(line[name]) for line in now for name in ("loss", "grad_norm"))
    assert json.loads((earlier / run / "run.json").read_text())["finished"] is True
    assert (earlier / run / "evaluation" / "after" / "summary.json").is_file()


def test_a_finished_training_is_left_alone_and_reported(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = earlier / "train_finished"
    before = contents(folder, "*.safetensors", "checkpoint-*/*", "metrics.jsonl", "evaluation/**/*.*")
    assert main(["train", "--config", "train_finished.yaml", "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert contents(folder, "*.safetensors", "checkpoint-*/*", "metrics.jsonl", "evaluation/**/*.*") == before
    assert main(["report", str(folder)]) == 0
    assert "train_finished" in (folder / "report.html").read_text()
    assert main(["evaluate", str(folder), "--like", str(folder), "--output", str(earlier / "again")]) == 0
    again, then = (
        json.loads((f / "summary.json").read_text()) for f in (earlier / "again", folder / "evaluation/after")
    )
    assert again["greedy"]["accuracy"] == then["greedy"]["accuracy"]
    assert again["settings"]["data"] == then["settings"]["data"]


def test_a_killed_curation_is_gone_on_with(earlier: Path) -> None:
    assert main(["curate", "--config", "curation.yaml", "--output_dir", "curation_stopped"]) == 0
    head, *rates = lines(earlier / "curation_stopped" / "pass_rates.jsonl")  # head: the earlier version's
    whole_head, *whole = lines(earlier / "curation_finished" / "pass_rates.jsonl")
    assert head == whole_head
    assert [row["key"] for row in rates] == [row["key"] for row in whole]  # samples: of this version's draws
    assert (earlier / "curation_stopped" / "curated.jsonl").is_file()


def test_a_finished_curation_samples_nothing_again(earlier: Path) -> None:
    folder = earlier / "curation_finished"
    samples = contents(folder, "pass_rates.jsonl", "guesses.jsonl", "curated.jsonl")
    assert main(["curate", "--config", "curation.yaml", "--output_dir", "curation_finished"]) == 0
    assert contents(folder, "pass_rates.jsonl", "guesses.jsonl", "curated.jsonl") == samples


def test_killed_rounds_are_gone_on_with(earlier: Path) -> None:
    folder, whole = earlier / "rounds_stopped", earlier / "rounds_finished"
    done = contents(folder, "start/**/*.*", "round-1/**/*.*", "round-2/sample*")
    assert main(["rounds", "--config", "rounds.yaml", "--output_dir", "rounds_stopped"]) == 0
    for name, content in done.items():  # what had its marker is not done again
        assert (folder / name).read_bytes() == content, name
    # out of the earlier version's samples; rows have their problem's columns besides now
    assert contents(folder, "round-2/select.json") == contents(whole, "round-2/select.json")
    rows, then = (lines(one / "round-2" / "rows.jsonl") for one in (folder, whole))
    assert [{name: row[name] for name in old} for row, old in zip(rows, then, strict=True)] == then
    assert (folder / "model.safetensors").is_file()


def test_finished_rounds_are_left_alone(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = earlier / "rounds_finished"
    before = contents(folder, "*.safetensors", "**/*.json*")
    assert main(["rounds", "--config", "rounds.yaml", "--output_dir", "rounds_finished"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    changed = {n for n, c in contents(folder, "*.safetensors", "**/*.json*").items() if before.get(n) != c}
    assert changed <= {"run.json"}


def test_a_killed_long2short_is_gone_on_with(earlier: Path) -> None:
    folder = earlier / "long2short_stopped"
    samples = contents(folder, "samples.jsonl", "evaluation/before/*")
    assert main(["long2short", "--config", "long2short.yaml", "--output_dir", "long2short_stopped"]) == 0
    assert contents(folder, "samples.jsonl", "evaluation/before/*") == samples
    rows = [contents(earlier / f"long2short_{state}", "rows.jsonl") for state in ("stopped", "finished")]
    assert rows[0] == rows[1]
