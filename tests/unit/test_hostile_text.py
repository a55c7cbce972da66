"""A seeded sample of scripts/hostile_text.py: hostile completions through every reward, nothing late, nothing raised, nothing run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import hostile_text

    return hostile_text


@pytest.mark.slow
def test_every_reward_survives_every_family(script: ModuleType) -> None:
    from hostile_families import FAMILIES, hostile

    seen, broken = script.through_ours(list(hostile(2 * len(FAMILIES), seed=15)), size=32)
    assert broken == []  # the pools fit for use, no text run as a program, memory bounded
    assert {name: one.broken for name, one in seen.items() if one.broken} == {}
    assert all(one.texts == 2 * len(FAMILIES) for name, one in seen.items() if not name.endswith("a worker"))
    assert seen["AccuracyReward strict, a worker"].texts > 10


def test_the_texts_follow_from_the_seed(script: ModuleType) -> None:
    from hostile_families import FAMILIES, hostile

    assert list(hostile(30, seed=3)) == list(hostile(30, seed=3))
    assert list(hostile(30, seed=3)) != list(hostile(30, seed=4))
    assert [name for name, _ in hostile(len(FAMILIES))] == list(FAMILIES)
