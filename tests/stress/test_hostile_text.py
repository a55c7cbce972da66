"""A seeded sample of tests/stress/hostile_text.py: hostile completions through every reward, nothing late, nothing
raised, nothing run."""

from __future__ import annotations

import pytest
from hostile_families import FAMILIES, hostile
from hostile_text import through_ours


@pytest.mark.slow
def test_every_reward_survives_every_family() -> None:
    seen, broken = through_ours(list(hostile(2 * len(FAMILIES), seed=15)), size=32)
    assert broken == []  # the pools fit for use, no text run as a program, memory bounded
    assert {name: one.broken for name, one in seen.items() if one.broken} == {}
    assert all(one.texts == 2 * len(FAMILIES) for name, one in seen.items() if not name.endswith("a worker"))
    assert seen["AccuracyReward strict, a worker"].texts > 10


def test_the_texts_follow_from_the_seed() -> None:
    assert list(hostile(30, seed=3)) == list(hostile(30, seed=3))
    assert list(hostile(30, seed=3)) != list(hostile(30, seed=4))
    assert [name for name, _ in hostile(len(FAMILIES))] == list(FAMILIES)
