"""Verifiers of mathematics that several files share: their workers import sympy once a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from grpo_lab.rewards import AccuracyReward
    from grpo_lab.verifiers import MathVerifier


@pytest.fixture(scope="session")
def verifier() -> Iterator[MathVerifier]:
    from grpo_lab.verifiers import MathVerifier

    yield from closed(MathVerifier(workers=1))


@pytest.fixture(scope="session")
def strict() -> Iterator[AccuracyReward]:
    from grpo_lab.rewards import AccuracyReward

    yield from closed(AccuracyReward(mode="strict", workers=1))


@pytest.fixture(scope="session")
def lenient() -> Iterator[AccuracyReward]:
    from grpo_lab.rewards import AccuracyReward

    yield from closed(AccuracyReward(mode="lenient", workers=1))


def closed(shared: Any) -> Iterator[Any]:
    yield shared
    shared.close()
