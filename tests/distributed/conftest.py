"""Worlds of 1, 2 and 4 processes, each launched once per session for all tests of this folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distributed.cases import CASES, WORLDS
from distributed.launch import World, train_cases

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture(scope="session")
def worlds(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    root = tmp_path_factory.mktemp("worlds")
    made = {}
    for processes in WORLDS:
        began = time.monotonic()
        runs = [case.spec(processes) for case in CASES]
        made[processes] = train_cases(WORKER, processes, tiny_folder, root / str(processes), runs)
        print(f"{len(runs)} trainings on {processes} process(es): {time.monotonic() - began:.0f} s")
    return made
