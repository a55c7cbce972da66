"""Resume inside a generation batch on two real ranks: each has its own half of the batch and its own random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.launch import run_worker
from distributed.resume_worker import STOP, build
from grpo_lab.trainer.resume.generation_buffer import rows_file
from grpo_lab.trainer.resume.state import STATE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("resume")
    run_worker("resume_worker", "ddp", 2, tiny_folder, out)
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_go_on_to_the_bit(reports: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = reports
    place = folder / "whole" / f"checkpoint-{STOP}"
    for rank, report in enumerate(ranks):
        assert (place / rows_file(rank)).is_file()
        assert report["weights equal"]
        assert report["resumed"] == report["whole"][2:]  # batches of steps 1–2, 3–4 (open), 5–6
        assert len(report["resumed"]) == 1
    assert ranks[0]["resumed history"] == ranks[0]["whole history"]
    assert len(ranks[0]["whole history"]) == 3
    assert ranks[0]["largest weight"] == ranks[1]["largest weight"]
    assert (place / rows_file(0)).read_bytes() != (place / rows_file(1)).read_bytes()


def test_sigterm_on_one_rank_makes_both_write(reports: tuple[Path, list[dict[str, Any]]]) -> None:
    for report in reports[1]:
        assert report["stopped at"] == STOP
        assert report["weights equal after SIGTERM"]


def test_a_rank_that_cannot_write_stops_both_and_leaves_nothing(reports: tuple[Path, list[dict[str, Any]]]) -> None:
    for report in reports[1]:
        assert "rank 1: OSError: [Errno 28] No space left on device" in report["not written"]
        assert report["left of it"] == []


def test_a_rank_without_its_file_stops_both(reports: tuple[Path, list[dict[str, Any]]]) -> None:
    for report in reports[1]:
        assert "No such file" in report["error"]
        assert rows_file(1) in report["error"]


def test_another_number_of_processes_is_warned_of(
    reports: tuple[Path, list[dict[str, Any]]], tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = build(str(tiny_folder), tmp_path)
    with caplog.at_level("WARNING", logger="grpo_lab"):
        alone.train(resume_from_checkpoint=str(reports[0] / "whole" / f"checkpoint-{STOP}"))
    assert "is of another run (number of processes 2 → 1)" in caplog.text
    assert f"does not hold it (no {STATE}" not in caplog.text
    assert alone.state.global_step == 6
