"""Shared fixtures. Nothing here needs the network; the shared data are found by ``grpo_lab_data`` or the test is
skipped."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; workers and ranks share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any load", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


def holds(mark: pytest.Mark, case: str) -> bool:
    """Whether a marker is meant for this case: ``cases`` are patterns of those that get it, ``but`` of others."""
    but = mark.kwargs.get("but", [])
    cases = mark.kwargs.get("cases", ["*"])
    without = [but] if isinstance(but, str) else but
    with_it = [cases] if isinstance(cases, str) else cases
    return any(fnmatchcase(case, one) for one in with_it) and not any(fnmatchcase(case, one) for one in without)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        case = item.nodeid.partition("[")[2].removesuffix("]")
        item.own_markers = [
            mark for mark in item.own_markers if mark.name not in ("not_fast", "thorough") or holds(mark, case)
        ]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # so that no worker of xdist ends with a long file


@pytest.fixture(scope="session")
def grpo_lab_data() -> Path:
    """The folder of real data (``$GRPO_LAB_DATA``, else ``../shared/data`` beside the checkout), or a skip."""
    folder = Path(os.environ.get("GRPO_LAB_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; set GRPO_LAB_DATA to the folder that holds gsm8k/, math/, …")
    return folder


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collections() -> None:
    """accelerate calls ``gc.collect()`` in every ``train()``; over a million objects of imported modules, which pytest
    has imported by now, that is a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Tests share their cores; what a module has asked of torch (``scripts/speedrun.py`` does) ends with it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def tables() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    from grpo_lab.advantages import RULES, TOKEN_RULES
    from grpo_lab.objectives import AGGREGATIONS, PRESETS, SURROGATES

    kept = [(table, dict(table)) for table in (RULES, TOKEN_RULES, AGGREGATIONS, PRESETS, SURROGATES)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random Qwen2 (some tens of thousands of parameters) with its tokenizer."""
    from grpo_lab.testing import tiny_model

    folder = tmp_path_factory.mktemp("tiny") / "qwen2"
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, initializer_range=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
