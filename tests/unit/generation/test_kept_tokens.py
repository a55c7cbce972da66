"""Log-probs among the tokens that an engine kept: the literal formula, the gradient, and what an answer must hold."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lab.trainer.generation.kept_sets import KeptSets
from grpo_lab.trainer.trl_bridge.kept import kept_at, kept_scores

VOCABULARY, WIDTH = 7, 5
SETS = [[0, 3, 6], [2], [1, 2, 4, 5]]


def sets(ids: list[list[int]]) -> torch.Tensor:
    widest = max(map(len, ids))
    return torch.tensor([[one + 1 for one in row] + [0] * (widest - len(row)) for row in ids])


@pytest.mark.parametrize("biased", [False, True])
def test_the_literal_formula_and_its_gradient(biased: bool) -> None:
    """Every token of every set: Σ_y π_K(y) = 1, and Σ_y π_K(y) ∇ log π_K(y) = 0, as of any distribution."""
    torch.manual_seed(0)
    hidden = torch.randn(len(SETS), WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True) if biased else None
    parts = [hidden, weight, *([] if bias is None else [bias])]
    mass = torch.zeros(len(SETS), dtype=torch.float64)
    mean = [torch.zeros_like(part) for part in parts]
    for turn in range(max(map(len, SETS))):
        labels = torch.tensor([row[min(turn, len(row) - 1)] for row in SETS])
        there = torch.tensor([turn < len(row) for row in SETS])
        found, entropies = kept_scores(hidden, weight, bias, labels, sets(SETS), 0.7)
        for row, kept in enumerate(SETS):
            z = [float((weight[k] @ hidden[row] + (0 if bias is None else bias[k])).detach() / 0.7) for k in kept]
            p = [math.exp(one) / sum(map(math.exp, z)) for one in z]
            assert found[row].item() == pytest.approx(math.log(p[kept.index(int(labels[row]))]), abs=1e-12)
            assert entropies[row].item() == pytest.approx(-sum(one * math.log(one) for one in p), abs=1e-12)
        mass += found.detach().exp() * there
        pushed = (found.detach().exp() * there * found).sum()
        for total, gradient in zip(mean, torch.autograd.grad(pushed, parts), strict=True):
            total += gradient
    assert mass.tolist() == pytest.approx([1.0] * len(SETS), abs=1e-12)
    assert max(float(total.abs().max()) for total in mean) < 1e-12


def test_sets_go_to_the_places_that_score_them() -> None:
    tokens = torch.tensor([[[3, 4], [5, 0], [0, 0]], [[6, 0], [7, 8], [9, 0]]])
    take = torch.tensor([[1, 2, 3], [1, 2, 3]])
    found = kept_at(tokens, take, 4)
    assert found is not None
    assert found.tolist() == [[[0, 0], [3, 4], [5, 0], [0, 0]], [[0, 0], [6, 0], [7, 8], [9, 0]]]
    at_the_end = kept_at(tokens[:1, :2].flip(1), torch.tensor([[3, 3]]), 4)
    assert at_the_end is not None
    assert at_the_end[0, 3].tolist() == [5, 4]  # never both: what is behind a completion is 0
    assert kept_at(None, take, 4) is None


def test_an_answer_holds_whole_sets_or_is_refused() -> None:
    half = math.log(0.5)
    names, values = [[[4, 9, 2], [7, 1, 3]]], [[[half, half, -math.inf], [0.0, -math.inf, None]]]
    taker = KeptSets(2)
    assert [KeptSets(most).logprobs for most in (0, 2, 40)] == [0, 18, 80]
    answer = taker.taken(([[1]], [[9, 7]], values, names))
    assert answer == ([[1]], [[9, 7]], [[[half], [0.0]]], [[[9], [7]]])
    found = taker.tensor(torch.tensor([[9, 7, 0]]), torch.tensor([[1, 1, 0]]))
    assert found is not None
    assert found.shape == (1, 3, 19)  # as wide on every rank, and in every batch
    assert found[0, :, :2].tolist() == [[5, 10], [8, 0], [0, 0]]
    assert not found[..., 2:].any()
    with pytest.raises(ValueError, match=r"probability 0\.500000 together"):
        KeptSets(2).taken(([[1]], [[9]], [[[half]]], [[[9]]]))
    others = [([[9, 7, 0]] * 2, [[1, 1, 0]] * 2), ([[9, 8, 0]], [[1, 1, 0]]), ([[9, 7, 5]], [[1, 1, 1]])]
    for ids, mask in others:  # more rows, another turn's tokens, a tool's answer behind them
        with pytest.raises(ValueError, match="completions are not the 1 that the engine made last"):
            taker.tensor(torch.tensor(ids), torch.tensor(mask))
    assert KeptSets(0).taken(answer) is answer
    assert KeptSets(0).tensor(torch.zeros(2, 1), torch.zeros(2, 1)) is None
