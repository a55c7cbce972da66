"""The sources' sorting run, shortened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.not_fast
def test_the_sources_sorting_run_begins_at_chance_and_learns() -> None:
    """A net that knows nothing of the prompt earns about 3 whatever it says (1.65 for pairs in order and 1.38 for
    inclusion if it is uniform); the first tenth of the run takes it above 4."""
    lab = loaded("recipes/lab/sorting/sources.py")
    lab.OUTER = 20
    curve, rows = lab.train(seed=0, epsilon=0.2)
    assert 2.4 < curve[0]["inclusion_ordering"] < 3.6
    assert curve[-1]["inclusion_ordering"] > 4
    assert all(one["inclusion_ordering_multiset"] <= one["inclusion_ordering"] for one in curve)
    assert len(rows) == 8
