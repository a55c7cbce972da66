"""``scripts/arm_runs.py``: the record of an arm, by hand; and the sources' sorting run, shortened."""

from __future__ import annotations

import importlib.util
import json
import math
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


def test_tokens_of_a_run_that_was_killed_and_went_on(tmp_path: Path) -> None:
    arms = loaded("scripts/arm_runs.py")
    logs = [(1, 80), (2, 240), (2, 248), (3, None), (4, 488)]  # step 2 twice: the later counts; step 3 says nothing
    rows = [{"step": s, "loss": 0.0} | ({} if n is None else {"rollout/generated": n}) for s, n in logs]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = [(0, 0.1), (2, 0.2), (2, 0.3), (4, 0.5)]
    lines = [json.dumps({"step": s, "accuracy": a, "seconds": 1.0 * s}) + "\n" for s, a in points]
    (tmp_path / "points.jsonl").write_text("".join(lines) + '{"step": 6, "accu')  # killed while it wrote
    found = arms.points_of(tmp_path)
    assert [(p["step"], p["tokens"], p["accuracy"]) for p in found] == [(0, 0, 0.1), (2, 248, 0.3), (4, 488, 0.5)]
    assert arms.at_tokens(found, 247) == 0.1  # nothing better was there yet
    assert arms.at_tokens(found, 248) == 0.3
    assert arms.at_tokens(found, 513) == 0.5  # 488 are 95% of it
    assert math.isnan(arms.at_tokens(found, 514))
    # 10, 30, 50 percent: differences 20 and 20; then 20 and 0, mean 10, variance 100
    assert arms.smoothness(found) == pytest.approx(0.0, abs=1e-9)
    assert arms.smoothness([*found[:2], found[1]]) == pytest.approx(100.0)


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
