"""On real outputs whose answers stand in boxes, AccuracyReward and TRL's `accuracy_reward` say the same (a sample; the
script: all)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_verify

    return bench_verify


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_the_same_verdicts(script: ModuleType, grpo_lab_data: Path, name: str) -> None:
    rows = script.rows_of(name, grpo_lab_data)[::5]
    ours = script.our_side(rows, warm=False, fast_path=True)(rows)
    assert ours == script.trl_side()(rows)
    assert 0.2 < sum(value or 0.0 for value in ours) / len(ours) < 1.0
