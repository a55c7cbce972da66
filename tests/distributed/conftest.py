"""Worlds of 1, 2 and 4 processes and a sharded one, each launched once a session, by the first worker of xdist that
asks for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from distributed.cases import CASES, SHARDED
from distributed.launch import World, train_cases


class Worlds(dict[int, World]):
    """Number of processes -> its world, launched when it is asked for."""

    def __init__(self, model: Path, root: Path) -> None:
        super().__init__()
        self.model, self.root = model, root

    def __missing__(self, processes: int) -> World:
        runs = [case.spec(processes) for case in CASES if processes in case.worlds]
        config = "ddp" if processes > 1 else "single"
        self[processes] = once(self.root / f"world-{processes}", processes, self.model, runs, config)
        return self[processes]


def once(out: Path, processes: int, model: Path, runs: list[dict[str, Any]], *how: Any) -> World:
    """The world in ``out``; made now unless another worker of xdist has made it."""
    with FileLock(f"{out}.lock"):
        if not out.with_suffix(".made").exists():
            began = time.monotonic()
            train_cases(processes, model, out, runs, *how)
            out.with_suffix(".made").touch()
            print(f"{len(runs)} trainings on {processes} process(es) ({how[0]}): {time.monotonic() - began:.0f} s")
    return World(processes, out)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def worlds(tiny_folder: Path, shared_folder: Path) -> dict[int, World]:
    return Worlds(tiny_folder, shared_folder)


@pytest.fixture(scope="session")
def sharded_world(tiny_folder: Path, shared_folder: Path) -> World:
    """Two processes that each hold half of every parameter, wrapped by accelerate as ``recipes/accelerate/fsdp2.yaml``
    says."""
    runs = [case.spec(2) for case in SHARDED]
    return once(shared_folder / "sharded-2", 2, tiny_folder, runs, "fsdp2")
