"""The discounted return against a literal loop over single tokens; hand values; γ = 1 is the row rule; no group of
deltas is another's."""

from __future__ import annotations

import random

import pytest
import torch

from grpo_lab.advantages import advantage_rule
from grpo_lab.advantages.returns import DELTAS
from grpo_lab.batch import LocalRows, RewardTable


def table(seed: int, groups: int = 3, size: int = 4, width: int = 7) -> RewardTable:
    """Ragged masks with holes (tool output); one row without a token of its own; the last group lies on another
    rank."""
    rng = random.Random(seed)
    values = torch.tensor([[rng.choice([0.0, 0.25, 1.0])] for _ in range(groups * size)])
    mask = torch.tensor([[rng.random() < 0.6 for _ in range(width)] for _ in range((groups - 1) * size)])
    mask[1] = False
    rows = slice(size, groups * size)
    return RewardTable(values, ("r",), torch.ones(1), size, local=LocalRows(rows, mask, mask.sum(1)))


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.93, 1.0])
def test_literal_loop(delta: str, gamma: float) -> None:
    for seed in range(40):
        batch = table(seed)
        assert batch.local is not None
        row = advantage_rule(delta)(batch.total, batch.group_size)[batch.local.rows].tolist()
        found = advantage_rule("returns", gamma=gamma, delta=delta)(batch)
        for own, reward, numbers in zip(batch.local.mask.tolist(), row, found.tolist(), strict=True):
            places = [t for t, mine in enumerate(own) if mine]
            paid = [0.0] * (len(places) - 1) + [reward]  # r_k of the tokens that the policy made
            for n, t in enumerate(places):
                expected = sum(gamma ** (k - n) * paid[k] for k in range(n, len(places)))
                assert numbers[t] == pytest.approx(expected, rel=1e-13, abs=1e-15)
            assert all(numbers[t] == 0 for t in range(len(own)) if t not in places)
            if gamma == 1.0:
                assert all(numbers[t] == reward for t in places)


def test_hand_value() -> None:
    # rewards 1 and 0: centred ±½. Three own tokens with a tool's between: γ = ½ pays ⅛, ¼, ½ of what is at the end
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    local = LocalRows(slice(0, 2), mask, torch.tensor([4, 2]))
    batch = RewardTable(torch.tensor([[1.0], [0.0]]), ("r",), torch.ones(1), 2, local=local)
    found = advantage_rule("returns", gamma=0.5)(batch)
    assert found.tolist() == [[0.125, 0.0, 0.25, 0.5], [-0.25, -0.5, 0.0, 0.0]]


def test_the_door() -> None:
    with pytest.raises(ValueError, match=r"`advantage.gamma` is 1.5"):
        advantage_rule("returns", gamma=1.5)
    with pytest.raises(ValueError, match=r"`advantage.delta` is 'process'"):
        advantage_rule("returns", delta="process")
