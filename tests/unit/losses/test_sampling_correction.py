"""The correction's weights by completion length: quartiles, what the bounds keep, sums and counts, by hand."""

from __future__ import annotations

import torch

from grpo_lab.objectives.corrections import TokenMask
from grpo_lab.trainer.metrics.book import by_length, length_quartiles

NOT_ZERO = TokenMask(None, None)


def test_quartiles_by_hand() -> None:
    # cuts of 1..8 at 2.75, 4.5, 6.25; equal lengths share a quartile
    assert length_quartiles(torch.tensor([8, 1, 2, 3, 7, 6, 5, 4])).tolist() == [3, 0, 0, 1, 3, 2, 2, 1]
    assert length_quartiles(torch.tensor([5, 5, 5, 5])).tolist() == [0, 0, 0, 0]
    assert length_quartiles(torch.tensor([9])).tolist() == [0]


def test_token_weights_count_loss_tokens() -> None:
    weights = torch.tensor([[1.0, 0.5, 9.0], [0.0, 1.5, 2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    pairs = by_length(NOT_ZERO, weights, mask, torch.tensor([0, 3]))
    found = {name: (float(total), int(count)) for name, total, count in pairs}
    assert found["sampling/ratio_mean/len_q1"] == (1.5, 2)  # 1 + 0.5; the 9 carries no loss
    assert found["sampling/ratio_mean/len_q4"] == (3.5, 3)
    assert found["sampling/kept_share/len_q1"] == (2.0, 2)
    assert found["sampling/kept_share/len_q4"] == (2.0, 3)
    assert found["sampling/ratio_mean/len_q2"] == found["sampling/kept_share/len_q3"] == (0.0, 0)


def test_sequence_weights_count_completions_with_loss() -> None:
    weights = torch.tensor([[0.5], [2.0], [7.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    pairs = by_length(NOT_ZERO, weights, mask, torch.tensor([1, 1, 1]))
    found = {name: [float(total), float(count)] for name, total, count in pairs}
    assert found["sampling/ratio_mean/len_q2"] == [2.5, 2.0]
