"""Process supervision (DeepSeekMath §4.1.3): a worked example by hand, loops in float64, outcome GRPO as the special
case."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grpo_lab.advantages import Process, StepTable, advantage_rule, spread

Steps = list[list[tuple[int, float | None]]]


def literal(steps: Steps, group_size: int, widths: list[int], epsilon: float) -> list[list[float]]:
    """The paper's formula, number by number."""
    tokens = []
    for start in range(0, len(steps), group_size):
        group = steps[start : start + group_size]
        scores = [score for row in group for _, score in row if score is not None]
        mean = math.fsum(scores) / len(scores) if scores else 0.0
        std = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) if len(scores) > 1 else 0.0
        same = len(set(scores)) <= 1
        for row, width in zip(group, widths[start : start + group_size], strict=True):
            made = [(end, 0.0 if same else (s - mean) / (std + epsilon)) for end, s in row if s is not None]
            tokens.append([math.fsum(r for end, r in made if end >= t) for t in range(width)])
    return tokens


def ours(steps: Steps, group_size: int, width: int, epsilon: float = 1e-4) -> torch.Tensor:
    return spread(Process(epsilon).normalised(StepTable.of(steps, group_size)), width)


def test_worked_example() -> None:
    """Two completions of one question. R = {1, 0, 1, 1, 0}: mean 3/5, squares 2·0.36 + 3·0.16 = 1.2, std √(1.2/4) =
    √0.3.

    r̃(1) = 0.4/√0.3 = 0.730297, r̃(0) = −0.6/√0.3 = −1.095445 (ε = 0). First completion, steps ending at tokens 1, 3
    with 1, 0: t = 0, 1 → 0.730297 − 1.095445 = −0.365148; t = 2, 3 → −1.095445; t = 4 → 0. Second, ends 0, 2, 4 with 1,
    1, 0: t = 0 → 2·0.730297 − 1.095445 = 0.365148; t = 1, 2 → −0.365148; t = 3, 4 → −1.095445.
    """
    found = ours([[(1, 1.0), (3, 0.0)], [(0, 1.0), (2, 1.0), (4, 0.0)]], 2, 5, epsilon=0.0)
    a, b = 0.4 / math.sqrt(0.3), -0.6 / math.sqrt(0.3)
    expected = [[a + b, a + b, b, b, 0.0], [2 * a + b, a + b, a + b, b, b]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.not_fast
def test_against_loops() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        group_size, groups = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 5])
        widths = [rng.randrange(1, 30) for _ in range(group_size * groups)]
        steps: Steps = []
        for width in widths:
            ends = sorted(rng.sample(range(width), rng.randrange(0, min(width, 6) + 1)))
            values = [rng.choice([0.0, 1.0, 0.5, rng.uniform(-3, 3), None]) for _ in ends]
            steps.append(list(zip(ends, values, strict=True)))
        epsilon = rng.choice([0.0, 1e-4]) if seed % 3 else 1e-4
        found = ours(steps, group_size, max(widths), epsilon)
        for row, (width, expected) in enumerate(zip(widths, literal(steps, group_size, widths, epsilon), strict=True)):
            # float64: at most 40 scores a group, sums of at most 6 terms of size ≤ 6
            assert found[row, :width].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11), seed
            assert (found[row, width:] == 0).all()


@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("group_size", [2, 6, 8])
def test_one_step_a_completion_is_outcome_grpo_to_the_bit(group_size: int, std: str) -> None:
    draw = torch.Generator().manual_seed(group_size)
    rewards = torch.randn(group_size * 5, generator=draw, dtype=torch.float64)
    rewards[:group_size] = 0.1  # a dead group
    ends = torch.randint(0, 20, (rewards.numel(),), generator=draw).tolist()
    table = StepTable.of([[(end, r)] for end, r in zip(ends, rewards.tolist(), strict=True)], group_size)
    found = spread(Process(std=std).normalised(table), 20)
    outcome = advantage_rule("group_zscore", std=std)(rewards, group_size)
    for row, end in enumerate(ends):
        assert torch.equal(found[row, : end + 1], outcome[row].expand(end + 1))
        assert (found[row, end + 1 :] == 0).all()


def test_a_rank_spreads_its_own_rows_only() -> None:
    steps: Steps = [[(0, 1.0), (3, 0.0)], [], [(2, 0.5)], [(1, 0.0), (2, 1.0)]]
    normal = Process().normalised(StepTable.of(steps, 2))
    whole = spread(normal, 4)
    parts = [spread(normal.local(slice(first, first + 1)), 4) for first in range(4)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([[(3, 1.0), (1, 0.0)], []], "ascending"),
        ([[(1, 1.0), (1, 0.0)], []], "ascending"),
        ([[(1, float("inf"))], []], "infinite"),
        ([[(1, 1.0)]], "whole groups"),
        ([[(9, 1.0)], []], "ends at token 9"),
        ([[(-1, 1.0)], []], "counts from 0"),
    ],
)
def test_bad_steps(steps: Steps, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ours(steps, 2, 4)
