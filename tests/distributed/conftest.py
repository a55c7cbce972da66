"""Worlds of 1, 2 and 4 processes, each each launched once per session, when a test first asks for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distributed.cases import CASES, SHARDED
from distributed.launch import HERE, World, train_cases


class Worlds(dict[int, World]):
    """Number of processes -> its world, launched when it is asked for."""

    def __init__(self, model: Path, root: Path) -> None:
        super().__init__()
        self.model, self.root = model, root

    def __missing__(self, processes: int) -> World:
        began = time.monotonic()
        runs = [case.spec(processes) for case in CASES]
        out = self.root / str(processes)
        self[processes] = train_cases(processes, self.model, out, runs, "ddp" if processes > 1 else "single")
        print(f"{len(runs)} trainings on {processes} process(es): {time.monotonic() - began:.0f} s")
        return self[processes]


@pytest.fixture(scope="session")
def worlds(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    return Worlds(tiny_folder, tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="session")
def sharded_world(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two processes that each hold half of every parameter, wrapped by accelerate as ``recipes/accelerate/fsdp2.yaml`` says."""
    began = time.monotonic()
    runs = [case.spec(2) for case in SHARDED]
    out = tmp_path_factory.mktemp("sharded") / "2"
    world = train_cases(2, tiny_folder, out, runs, "fsdp2", before=[str(HERE / "cpu_fsdp2.py")])
    print(f"{len(runs)} trainings on 2 sharded processes: {time.monotonic() - began:.0f} s")
    return world
